"""Who asks: tenants with their keys and quotas, read from a YAML file."""

import hmac
import re
from collections import Counter
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError, field_validator, model_validator

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

    ``key``: the API key, of visible ASCII characters, as a header carries no others; a tenant without one is named by
    the header ``X-Tenant`` alone.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    key: SecretStr | None = Field(default=None, min_length=8)
    kv_tokens: int | None = Field(default=None, gt=0)
    kv_share: float | None = Field(default=None, gt=0, le=1)
    queue: int = Field(default=16, ge=0)

    @field_validator("key")
    @classmethod
    def _fits_a_header(cls, key: SecretStr | None) -> SecretStr | None:
        if key is not None and not re.fullmatch(r"[!-~]+", key.get_secret_value()):
            raise ValueError("a key is made of visible ASCII characters, without spaces")
        return key

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
            tenants = cls({_checked_name(name): Tenant.model_validate(fields) for name, fields in content.items()})
            tenants._check_keys(path)
            return tenants
        except ValidationError as error:
            first = error.errors(include_input=False)[0]  # the input may hold a key
            where = ".".join(str(part) for part in first["loc"])
            raise TenantsError(f"{path}: {where + ': ' if where else ''}{first['msg']}") from None

    def _check_keys(self, path: Path) -> None:
        """A key proves one tenant."""
        owners = Counter(tenant.key.get_secret_value() for tenant in self._with_key.values())
        if shared := [name for name, tenant in self._with_key.items() if owners[tenant.key.get_secret_value()] > 1]:
            raise TenantsError(f"{path}: {' and '.join(shared)} have the same key")

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


class _Loader(yaml.SafeLoader):
    """YAML's safe loader, but for repeated keys, of which it would take the last and forget the others."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, object]:
        names = Counter(key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode))
        if repeated := [name for name, count in names.items() if count > 1]:
            raise TenantsError(f"{', '.join(repeated)} is there more than once")
        return super().construct_mapping(node, deep)


def _parsed(path: Path) -> object:
    try:
        return yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)
    except TenantsError as error:
        raise TenantsError(f"{path}: {error}") from None
    except OSError as error:
        raise TenantsError(f"{path}: {error.strerror}") from None
    except (yaml.YAMLError, ValueError, RecursionError):  # a ValueError: a date such as 2001-99-99
        raise TenantsError(f"{path} is not YAML") from None


def _checked_name(name: object) -> str:
    if not isinstance(name, str) or not name.isidentifier() or name == UNKNOWN:
        raise TenantsError(f"{name!r} is no name for a tenant: letters, digits and _, and not {UNKNOWN!r}")
    return name
