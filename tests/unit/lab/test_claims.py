"""A verdict is computed from a run; a ledger that cannot be computed is refused."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from checkout import CLAIM

from kvlab.errors import KvlabError
from kvlab.lab.claims import Claim, judge, load_claims
from kvlab.lab.run import Device, Metric, Run, Source


def a_run(device: str = "cpu", **values) -> Run:
    return Run(
        lab="01-tiny",
        profile="quick",
        parameters={},
        started_at=datetime.now(UTC),
        device=Device(kind=device, name="any"),
        software={},
        source=Source(commit=None, dirty=None, lab_sha256=None, src_sha256="0", environment_sha256="0"),
        metrics={name: Metric(value=value, unit="", kind="exact") for name, value in values.items()},
    )


def claim(**changes) -> Claim:
    return Claim.model_validate(CLAIM | changes)


def test_the_first_true_rule_gives_the_verdict():
    assert judge(claim(), a_run(answer=42)).verdict == "holds"
    other = judge(claim(), a_run(answer=41))
    assert (other.verdict, other.as_expected) == ("does not hold", False)


def test_a_claim_without_a_run_or_without_rules_is_not_run_yet():
    assert judge(claim(), None).verdict == "not run yet"
    untested = judge(claim(rules=[], expected="not run yet"), a_run(answer=42))
    assert (untested.verdict, untested.as_expected) == ("not run yet", True)


def test_a_missing_run_of_a_tested_claim_does_not_read_as_a_pass():
    assert not judge(claim(), None).as_expected


def test_a_metric_that_was_not_recorded_is_not_a_pass():
    judgement = judge(claim(), a_run(question=6))
    assert not judgement.as_expected
    assert "cannot be computed" in judgement.because


def test_a_claim_for_cuda_is_not_run_on_a_cpu():
    judgement = judge(claim(devices=["cuda"]), a_run(answer=42))
    assert (judgement.verdict, judgement.as_expected) == ("not run on this device", True)


def test_a_claim_for_the_full_profile_is_not_run_yet_in_quick_and_judged_in_full():
    full_only, quick = claim(profiles=["full"]), a_run(answer=42)
    judgement = judge(full_only, quick)
    assert (judgement.verdict, judgement.as_expected) == ("not run yet", True)
    assert judgement.because == "needs the full profile"
    assert judge(full_only, quick.model_copy(update={"profile": "full"})).verdict == "holds"
    assert not judge(full_only, a_run(answer=41).model_copy(update={"profile": "full"})).as_expected


def test_a_rule_may_be_for_one_device():
    rules = [dict(CLAIM["rules"][0], device="cuda"), dict(CLAIM["rules"][1], when="answer == 42")]
    assert judge(claim(rules=rules), a_run("cuda", answer=42)).verdict == "holds"
    assert judge(claim(rules=rules), a_run("cpu", answer=42)).verdict == "does not hold"


def test_rules_cannot_reach_into_python():
    rules = [dict(CLAIM["rules"][0], when="answer.__class__"), CLAIM["rules"][1]]
    assert "cannot be computed" in judge(claim(rules=rules), a_run(answer=42)).because


@pytest.mark.parametrize(
    "changes",
    [
        {"prediction": ""},
        {"falsifier": ""},
        {"expected": "holds in part"},
        {"verdict": "holds"},
        {"id": None},
        {"profiles": []},
    ],
)
def test_a_claim_that_could_not_be_wrong_is_refused(checkout, changes):
    checkout.write_claims([CLAIM | changes])
    with pytest.raises(KvlabError, match="is not a claims ledger"):
        load_claims()


def test_a_claim_stands_once(checkout):
    checkout.write_claims([CLAIM, CLAIM])
    with pytest.raises(KvlabError, match="claims twice: tiny-1"):
        load_claims()


def test_the_books_ledger_loads_and_names_existing_labs_for_tested_claims(repository):
    ledger = load_claims(repository / "book" / "claims.yml")
    assert len(ledger) == 41
    for entry in ledger:
        if entry.rules:
            assert (repository / "labs" / f"{entry.lab}.ipynb").is_file(), entry.id
