"""The claims ledger: what the article says, what we predict, what would prove us wrong, and the verdict of a run.

``book/claims.yml`` holds every claim. Its rules are expressions over a run's metrics; the verdict is that of
the first rule that is
true. So a verdict is computed from evidence, in the notebook and again by the tests, and never typed in by hand.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from simpleeval import InvalidExpression, SimpleEval

from kvlab.errors import KvlabError
from kvlab.lab import provenance
from kvlab.lab.run import LabError, Run, VerdictName

_FUNCTIONS = {"abs": abs, "min": min, "max": max, "len": len, "round": round}


class Rule(BaseModel):
    """``verdict`` if ``when`` is true of the run's metrics; ``device`` limits the rule to one kind of device."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    when: str
    verdict: VerdictName
    because: str
    device: Literal["cpu", "cuda"] | None = None


class Claim(BaseModel):
    """One claim of the article (or of ours), its test and the verdict on record."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    id: str
    lab: str
    statement: str
    section: str
    """Part of the article the claim is from."""
    prediction: str = ""
    falsifier: str = ""
    rules: list[Rule] = []
    expected: VerdictName = "not run yet"
    devices: list[Literal["cpu", "cuda"]] = ["cpu", "cuda"]
    profiles: list[Literal["quick", "full"]] = Field(default=["quick", "full"], min_length=1)
    """Profiles at whose scale the claim can be judged."""

    @model_validator(mode="after")
    def _tested_claims_say_what_they_expect(self) -> Claim:
        if self.rules and not (self.prediction and self.falsifier):
            raise ValueError(f"claim {self.id} has rules but no prediction or no falsifier")
        if self.rules and self.expected not in {rule.verdict for rule in self.rules}:
            raise ValueError(f"claim {self.id} expects {self.expected!r}, which none of its rules can give")
        return self


@dataclass(frozen=True)
class Judgement:
    claim: Claim
    verdict: VerdictName
    because: str
    as_expected: bool


class UnexpectedVerdict(LabError):
    """A run does not support the verdict on record: either the code broke or the book is wrong."""

    def __init__(self, judgements: list[Judgement]):
        parts = [f"{j.claim.id}: expected {j.claim.expected!r}, got {j.verdict!r} ({j.because})" for j in judgements]
        super().__init__("; ".join(parts))


def claims_file() -> Path:
    return provenance.repository() / "book" / "claims.yml"


def load_claims(path: Path | None = None) -> list[Claim]:
    """All claims, in the article's order; KvlabError in one line if the file is not a ledger."""
    path = path or claims_file()
    try:
        claims = [Claim.model_validate(entry) for entry in yaml.safe_load(path.read_text(encoding="utf-8"))]
    except FileNotFoundError:
        raise KvlabError(f"{path} is missing: run this in a checkout of the book") from None
    except (yaml.YAMLError, ValidationError, TypeError, UnicodeDecodeError) as error:
        raise KvlabError(f"{path} is not a claims ledger: {' '.join(str(error).split())[:300]}") from None
    ids = [claim.id for claim in claims]
    if repeated := {claim_id for claim_id in ids if ids.count(claim_id) > 1}:
        raise KvlabError(f"{path} has claims twice: {', '.join(sorted(repeated))}")
    return claims


def judge(claim: Claim, run: Run | None) -> Judgement:
    """The verdict of ``run`` on ``claim``.

    No run, or a claim without rules: "not run yet". A claim whose experiment needs another device: "not run on
    this device"; another profile: "not run yet". No rule true, or a rule that cannot be computed: "not run yet", and
    not as expected: the lab is red.
    """
    if run is None or not claim.rules:
        return Judgement(claim, "not run yet", "no run of this claim", as_expected=not claim.rules)
    if run.device.kind not in claim.devices:
        return Judgement(claim, "not run on this device", f"needs {' or '.join(claim.devices)}", as_expected=True)
    if run.profile not in claim.profiles:
        return Judgement(claim, "not run yet", f"needs the {' or '.join(claim.profiles)} profile", as_expected=True)
    for rule in claim.rules:
        if rule.device not in (None, run.device.kind):
            continue
        try:
            true = SimpleEval(names=run.values(), functions=_FUNCTIONS).eval(rule.when)
        except (InvalidExpression, TypeError, ValueError) as error:
            return Judgement(claim, "not run yet", f"rule {rule.when!r} cannot be computed: {error}", as_expected=False)
        if true:
            return Judgement(claim, rule.verdict, rule.because, as_expected=rule.verdict == claim.expected)
    return Judgement(claim, "not run yet", "no rule of the claim is true of this run", as_expected=False)
