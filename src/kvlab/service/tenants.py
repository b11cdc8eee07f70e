"""Who asks: tenants with their keys and quotas, read from a YAML file."""

import hmac
from collections.abc import Mapping
from pathlib import Path
from typing import Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError, model_validator

from kvlab.errors import KvlabError

from .admission import Quota

ANONYMOUS = "anonymous"
UNKNOWN = "unknown"


class TenantsError(KvlabError, ValueError):
    """The tenants' file cannot be used."""


class UnknownTenant(KvlabError):
    """The key or the name belongs to nobody."""


class Tenant(BaseModel):
    """``kv_tokens`` or ``kv_share`` of the capacity may be reserved at once, and ``queue`` requests may wait.

    ``key``: the API key; a tenant without one is named by the header ``X-Tenant`` alone.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    key: SecretStr | None = Field(default=None, min_length=8)
    kv_tokens: int | None = Field(default=None, gt=0)
    kv_share: float | None = Field(default=None, gt=0, le=1)
    queue: int = Field(default=16, ge=0)

    @model_validator(mode="after")
    def _one_quota(self) -> Self:
        if (self.kv_tokens is None) == (self.kv_share is None):
            raise ValueError("give either kv_tokens or kv_share")
        return self

    def quota(self, capacity_tokens: int) -> Quota:
        if self.kv_tokens is not None:
            return Quota(self.kv_tokens, self.queue)
        return Quota(int(self.kv_share * capacity_tokens), self.queue)


class Tenants:
    """All tenants by name. Without a file there is one, ``anonymous``, who may have everything."""

    def __init__(self, tenants: Mapping[str, Tenant]):
        self.by_name = dict(tenants)
        self._with_key = {name: tenant for name, tenant in tenants.items() if tenant.key is not None}

    @classmethod
    def only_anonymous(cls, queue_places: int) -> Self:
        return cls({ANONYMOUS: Tenant(kv_share=1.0, queue=queue_places)})

    @classmethod
    def read(cls, path: Path) -> Self:
        """From YAML: a mapping of names to the fields of ``Tenant``. Raises TenantsError."""
        try:
            content = _parsed(path)
            if not isinstance(content, dict) or not content:
                raise TenantsError(f"{path}: write one mapping of tenant names to key, kv_tokens or kv_share, queue")
            return cls({_checked_name(name): Tenant.model_validate(fields) for name, fields in content.items()})
        except ValidationError as error:
            first = error.errors(include_input=False)[0]  # the input may hold a key
            where = ".".join(str(part) for part in first["loc"])
            raise TenantsError(f"{path}: {where + ': ' if where else ''}{first['msg']}") from None

    def quotas(self, capacity_tokens: int) -> dict[str, Quota]:
        return {name: tenant.quota(capacity_tokens) for name, tenant in self.by_name.items()}

    def identify(self, authorization: str | None, name: str | None) -> str:
        """The tenant that the headers ``Authorization`` and ``X-Tenant`` prove; raises UnknownTenant.

        Every key is compared, each in constant time, so that an answer's delay tells nothing.
        """
        key = (authorization or "").removeprefix("Bearer ").strip().encode()
        owners = [
            owner
            for owner, tenant in self._with_key.items()
            if hmac.compare_digest(tenant.key.get_secret_value().encode(), key)
        ]
        if name is not None:
            if name in owners or (name in self.by_name and name not in self._with_key):
                return name
            raise UnknownTenant("no tenant of this name and key")
        if owners:
            return owners[0]
        if ANONYMOUS in self.by_name and (not key or not self._with_key):
            return ANONYMOUS
        raise UnknownTenant("give the API key of a tenant, or its name in the header X-Tenant")


def _parsed(path: Path) -> object:
    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, ValueError, RecursionError):  # a ValueError: a date such as 2001-99-99
        raise TenantsError(f"{path} is not YAML") from None


def _checked_name(name: object) -> str:
    if not isinstance(name, str) or not name.isidentifier() or name == UNKNOWN:
        raise TenantsError(f"{name!r} is no name for a tenant: letters, digits and _, and not {UNKNOWN!r}")
    return name
