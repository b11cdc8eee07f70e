"""What a bench promises, what it measured, and whether the promise holds."""

from pydantic import BaseModel
from rich.table import Table


class Check(BaseModel):
    """One promise and what was measured; a price that is only stated has no limit."""

    promise: str
    measured: float
    limit: float | None = None
    holds: bool | None = None
    reason: str = ""


def checks_table(checks: list[Check]) -> Table:
    table = Table("promise", "measured", "limit", "holds", "reason", title="Promises")
    for check in checks:
        limit = "" if check.limit is None else f"{check.limit:,.4g}"
        holds = {True: "yes", False: "NO", None: ""}[check.holds]
        table.add_row(check.promise, f"{check.measured:,.4g}", limit, holds, check.reason)
    return table
