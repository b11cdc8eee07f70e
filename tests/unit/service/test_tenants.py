"""Who a request belongs to, by key or name; keys never show."""

import pytest

from kvlab.service.tenants import Tenants, TenantsError, UnknownTenant

FILE = """
search: {key: sk-search-secret, kv_tokens: 600, queue: 8}
chat: {key: sk-chat-secret, kv_share: 0.25}
batch: {kv_share: 0.5}
"""

LEVELS = "abcdefghijklmnopqrst"  # each ten times the one before
BOMB = "\n".join(
    f"{name}: &{name} [{', '.join([f'*{before}' if before else '1'] * 10)}]"
    for before, name in zip(["", *LEVELS], LEVELS, strict=False)
)


@pytest.fixture
def tenants(tmp_path):
    path = tmp_path / "tenants.yml"
    path.write_text(FILE)
    return Tenants.read(path)


def test_a_key_proves_its_tenant(tenants):
    assert tenants.identify("Bearer sk-chat-secret", None) == "chat"
    assert tenants.identify("Bearer sk-search-secret", "search") == "search"


def test_a_name_is_enough_for_a_tenant_without_key(tenants):
    assert tenants.identify(None, "batch") == "batch"
    assert tenants.identify("Bearer anything", "batch") == "batch"


@pytest.mark.parametrize(
    ("authorization", "name"),
    [
        ("Bearer wrong-key", None),
        ("Bearer", None),
        (None, None),
        (None, "search"),
        ("Bearer sk-chat-secret", "search"),
        (None, "nobody"),
        ("Bearer sk-chat-sécret", None),
    ],
)
def test_anything_else_is_nobody(tenants, authorization, name):
    with pytest.raises(UnknownTenant):
        tenants.identify(authorization, name)


def test_without_a_file_everybody_is_anonymous_whatever_key_the_client_sends():
    tenants = Tenants.only_anonymous(3)
    assert tenants.identify(None, None) == tenants.identify("Bearer sk-unused", None) == "anonymous"
    with pytest.raises(UnknownTenant):
        tenants.identify(None, "search")


def test_quotas_are_tokens_or_shares_of_the_capacity(tenants):
    quotas = tenants.quotas(2000)
    assert {name: quota.kv_tokens for name, quota in quotas.items()} == {"search": 600, "chat": 500, "batch": 1000}
    assert quotas["search"].queue_places == 8


def test_a_key_shows_in_no_representation(tenants):
    assert "secret" not in repr(tenants.by_name)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("a: {kv_tokens: 5, key: short}", "key"),
        ("a: {kv_tokens: 5, kv_share: 0.5}", "either"),
        ("a: {}", "either"),
        ("a: {kv_tokens: -1}", "kv_tokens"),
        ("a b: {kv_tokens: 5}", "name"),
        ("unknown: {kv_tokens: 5}", "name"),
        ("[1, 2]", "mapping"),
        ("", "mapping"),
        ("a: {", "YAML"),
        ("[" * 3000, "YAML"),
        ("a: 2001-99-99", "YAML"),
        ("a: !!int x", "YAML"),
        ("a: {kv_tokens: 5, quota: 3}", "quota"),
        ("a: {kv_tokens: 5}\na: {kv_tokens: 6}", "a is there more than once"),
        ("a: {kv_tokens: 5, kv_tokens: 6}", "kv_tokens is there more than once"),
        ("a: {kv_tokens: 5, key: short-but-long}\nb: {kv_tokens: 5, key: short-but-long}", "a and b have the same key"),
        ("a: {kv_tokens: 5, key: shörtshört}", "visible ASCII"),
        ("a: {kv_tokens: 5, key: short short}", "visible ASCII"),
        ("a: {kv_tokens: 0}", "kv_tokens"),
        ("a: {kv_share: 0}", "kv_share"),
        ("a: {kv_share: .nan}", "kv_share"),
        ("a: {kv_tokens: 5, queue: -1}", "queue"),
        ("a: &a {kv_tokens: 5, more: *a}", "YAML|more"),
        (BOMB, "mapping|name|valid"),
    ],
)
def test_a_wrong_file_is_refused_with_the_reason_and_without_its_keys(tmp_path, text, reason):
    path = tmp_path / "tenants.yml"
    path.write_text(text)
    with pytest.raises(TenantsError, match=reason) as refused:
        Tenants.read(path)
    assert "short" not in str(refused.value)


def test_an_alias_shares_what_tenants_have_in_common(tmp_path):
    path = tmp_path / "tenants.yml"
    path.write_text("a: &usual {kv_share: 0.25, queue: 3}\nb: *usual\nc: {<<: *usual, queue: 5}\n")
    queues = {name: quota.queue_places for name, quota in Tenants.read(path).quotas(100).items()}
    assert queues == {"a": 3, "b": 3, "c": 5}


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(TenantsError, match=r"none\.yml: No such file"):
        Tenants.read(tmp_path / "none.yml")
