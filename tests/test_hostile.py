"""Bodies made to break a server: each gets a 4xx, the model is not asked, and who is being served notices nothing."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
from test_server import Running, native

from benchmarks.hostile import HOSTILE
from minispec.replies.formats import CALLS, Formats
from minispec.request import RequestError
from minispec.serve import parse

STREAM = native("Once upon", temperature=1.1, sampling_seed=3, max_new_tokens=150, ignore_eos=True)


SERVED = {"enable_metrics": False}


def test_hostile_bodies_are_refused_without_the_model_beside_a_stream_that_stays_the_same(
    served: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert all(sum(path == where for path, _ in HOSTILE) >= 30 for where in ("/v1/responses", "/v1/messages"))
    assert len(HOSTILE) >= 150 and len({json.dumps(body, default=str) for _, body in HOSTILE}) >= 150
    expected = served.ok("/generate", STREAM)["text"]
    submitted, streams = [], []
    scheduler = served.server.engine.llm.scheduler
    submit = scheduler.submit
    monkeypatch.setattr(scheduler, "submit", lambda request: submitted.append(request) or submit(request))
    with ThreadPoolExecutor(1) as pool:
        stream = pool.submit(served.stream, "/generate", STREAM)
        for path, body in HOSTILE:
            if stream.done():  # there is always one beside them
                streams.append(stream.result()[0])
                stream = pool.submit(served.stream, "/generate", STREAM)
            status, answer, headers = served.call(path, body)
            assert 400 <= status < 500, (path, str(body)[:300], answer)
            theirs = {"message", "type"} if path.startswith("/v1/messages") else {"message", "type", "param", "code"}
            assert set(answer["error"]) == theirs and headers["x-request-id"]
            assert 0 < len(answer["error"]["message"]) <= 2000
        streams.append(stream.result()[0])
    assert [events[-2]["text"] for events in streams] == [expected] * len(streams)
    assert [request.params.sampling_seed for request in submitted] == [3] * len(streams), [
        request for request in submitted if request.params.sampling_seed != 3
    ]
    served.idle()
    assert served.ok("/generate", STREAM)["text"] == expected


def test_tools_have_the_bound_of_a_prompt_and_are_not_rendered_beyond_it() -> None:
    class Shows:
        chat = SimpleNamespace(tool_template="one that has a place for tools")

        def encode_chat(self, *given: Any, **how: Any) -> list[int]:
            raise AssertionError("too large, and rendered all the same")

    function = {"name": "f", "description": "x" * 70_000}
    body = {"messages": [{"role": "user", "content": "a"}], "tools": [{"type": "function", "function": function}]}
    with pytest.raises(RequestError, match="tools has 70") as caught:
        parse.tokenize(parse.parse_chat(body, {}), Shows(), 1024, formats=Formats(CALLS["hermes"], None))
    assert (caught.value.param, caught.value.status) == ("tools", 400)
