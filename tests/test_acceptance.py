"""All who tell of acceptance tell the same, counted to the end of the text: answers, usage, traces, metrics, the log.

Each stop is put at every place of a text, so that it falls at a draft, behind one and at the target's own token. What
the target accepted is noted where the engine hands it over, before any stop rule has been applied.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from typing import Any

import pytest
from conformance import SUBJECTS
from exactness import request, run
from test_lookup import PAIRS, adversary
from test_schema import chat
from test_simulate import emitted

from benchmarks.throughput import accept_length, by_depth, verified
from minispec.asked.answers import Telling, meta_info
from minispec.load.tokenizer import byte_tokenizer
from minispec.replicas.wire import Told, taken
from minispec.request import Request, Trace, Update
from minispec.scheduler import Scheduler
from minispec.serve.info import load_of, stats_of
from minispec.serve.prometheus import counters
from minispec.serve.reply import Reply, Served

PLACES = range(4, 30)  # of the stop, in tokens
DRAFTERS = {"host": SUBJECTS["oracle"], "beside": PAIRS["standalone"]}
STOPS: dict[str, Any] = {
    "max_tokens": lambda ids, at: {"max_new_tokens": at + 1},
    "stop token": lambda ids, at: {"stop_token_ids": [ids[at]]},
    "stop string": lambda ids, at: {"stop": ["".join(chr(0x100 + token) for token in ids[at - 1 : at + 1])]},
}


def samples(scheduler: Scheduler) -> dict[str, Counter[str]]:
    """Return what /metrics has of acceptance: name -> source or "" -> value."""
    return {name: Counter({labels.get("source", ""): value for labels, value in of})
            for _, name, _, of in counters(scheduler, load_of(scheduler)) if "spec_" in name}  # fmt: skip


def assert_all_agree(scheduler: Scheduler, one: Request, given: list[int], lines: list[str]) -> int:
    """Compare all who tell of a request, the only one since the last flush; returns how many drafts lay behind."""
    steps, most = one.trace.steps, scheduler.sizes.nodes
    kept = [len(step["emitted"]) for step in steps]
    drafts = [min(tokens, count - 1) for tokens, count in zip(kept, given, strict=True)]
    assert [len(step["accepted"]) - 1 for step in steps] == drafts, "the trace, and with it page and explain"
    origins = Telling(one, str).upto(len(one.output_ids))["origins"]
    assert sum(origin > 0 for origin in origins) == sum(drafts)
    length, drafted = sum(kept) / len(kept), one.verified.drafted.total()
    sources = {step["source"] for step in steps} - {None}
    by_source = {source: {"spec_verify_ct": 0, "tokens": 0, "spec_num_correct_drafts": 0} for source in sources}
    for step, tokens, accepted in zip(steps, kept, drafts, strict=True):
        if step["source"] is not None:
            counts = by_source[step["source"]]
            counts["spec_verify_ct"] += 1
            counts["tokens"] += tokens
            counts["spec_num_correct_drafts"] += accepted

    info = meta_info(one, len(one.output_ids), one.finish, most)
    assert (info["spec_verify_ct"], info["spec_accept_token_num"]) == (len(kept), sum(drafts))
    assert info["spec_accept_length"] == length and info["spec_draft_token_num"] == drafted
    assert info["spec_accept_histogram"] == [drafts.count(i) for i in range(max(drafts) + 1)]

    job = chat(stream=True, stream_options={"include_usage": True}, return_spec_tokens_details=True,
               prediction={"type": "content", "content": "x"})  # fmt: skip
    extension, last = Reply(job, [one], Served("m", byte_tokenizer(256), nodes=most)).closing()
    details, usage = extension["sglext"]["spec_tokens_details"], last["usage"]["completion_tokens_details"]
    assert extension["choices"] == last["choices"] == []
    assert (details["spec_verify_ct"], details["spec_num_correct_drafts"]) == (len(kept), sum(drafts))
    assert details["spec_accept_length"] == length and details["spec_num_proposed_drafts"] == drafted
    assert details["spec_correct_drafts_histogram"] == info["spec_accept_histogram"]
    assert details["spec_accept_rate"] == info["spec_accept_rate"] == sum(drafts) / max(drafted, 1)
    assert usage == {"accepted_prediction_tokens": sum(drafts), "rejected_prediction_tokens": drafted - sum(drafts)}
    told = {source: {"tokens": round(of["spec_accept_length"] * of["spec_verify_ct"]),
                     **{name: of[name] for name in ("spec_verify_ct", "spec_num_correct_drafts")}}
            for source, of in details["spec_by_source"].items()}  # fmt: skip
    assert told == by_source

    scraped, stats, load = samples(scheduler), stats_of(scheduler), load_of(scheduler)["speculative"]
    names = {"drafts": "spec_verify_ct", "tokens": "tokens", "accepted_tokens": "spec_num_correct_drafts"}
    for name, key in names.items():
        wanted = Counter({source: of[key] for source, of in by_source.items()})
        assert +scraped[f"minispec:spec_{name}_total"] == +wanted, name
    assert scraped["minispec:spec_draft_tokens_total"].total() == drafted
    assert scraped["sglang:spec_verify_calls_total"][""] == stats["verify_steps"] == len(kept)
    assert stats["avg_spec_accept_length"] == load["accept_length"] == length
    assert load["accept_rate"] == info["spec_accept_rate"]
    assert [float(found[1]) for line in lines if (found := re.search(r"accept len: ([\d.]+)", line))] == kept
    assert accept_length(verified([one])) == length and len(by_depth(verified([one]))) == max(drafts)
    return sum(given) - len(given) - sum(drafts)


@pytest.mark.parametrize("stop", STOPS)
@pytest.mark.parametrize("name", DRAFTERS)
def test_all_who_tell_of_acceptance_agree_wherever_a_text_ends(
    name: str, stop: str, caplog: pytest.LogCaptureFixture
) -> None:
    scheduler = DRAFTERS[name].build(running=1)
    if name == "beside":
        adversary(scheduler)
    whole = request("whole", [5, 9, 2] * 4, max_new_tokens=32)
    run(scheduler, [whole])
    given, behind, sources = emitted(scheduler), [], Counter[str]()
    for at in PLACES:
        assert scheduler.flush_cache()
        scheduler.metrics.log_interval = 1
        given.clear()
        caplog.clear()
        wish = {"max_new_tokens": 32, **STOPS[stop](whole.output_ids, at)}
        one = request("one", whole.prompt_ids, **wish)
        one.trace = Trace()
        with caplog.at_level(logging.INFO, "minispec"):
            run(scheduler, [one])
        assert one.output_ids == whole.output_ids[: len(one.output_ids)]
        if one.verified.steps:
            behind.append(assert_all_agree(scheduler, one, given, caplog.messages))
            sources.update(one.verified.accepted)
    assert sum(behind) > 2 and behind.count(0) > 2, "the stops fell nowhere in an accepted path, or always"
    assert {s for s, count in sources.items() if count} == {"host": {"host"}, "beside": {"head", "lookup"}}[name]


def test_a_replica_s_counts_arrive_as_they_were_when_the_update_was_made() -> None:
    here, there = request("r", [5, 9, 2]), request("r", [5, 9, 2])
    scheduler = SUBJECTS["oracle"].build(running=1)
    run(scheduler, [there])
    told = Told(there).update(Update(there, [], "", there.finish))
    counted = dict(there.verified.steps)
    there.verified.steps["host"] += 1
    taken(here, told)
    assert dict(here.verified.steps) == counted and here.verified.accepted == there.verified.accepted
    assert here.verified.accepted.total() > 5
