"""External corpora: matches against brute force, exact texts with and without them, and who may add or name one."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_llm import CONFIG, DUMMY

from minispec import LLM, SamplingParams
from minispec.config import Config
from minispec.corpora import DEPTH, END, SHORTEST, Corpora, Corpus, sort_places
from minispec.drafter import Draft
from minispec.ngram import NgramDrafter, NgramOptions
from minispec.request import Hints, Request, RequestError


def corpus(*documents: list[int]) -> Corpus:
    """Return the corpus of documents given as ids."""
    tokens = np.array([token for document in documents for token in (*document, END)], np.int32)
    return Corpus(tokens, sort_places(tokens))


def brute(tokens: list[int], after: list[int], longest: int) -> int:
    """Return the length of the longest match of the last tokens, by looking at every place."""
    best = 0
    for at in range(1, len(tokens) + 1):
        match = 0
        while match < min(longest, at, len(after)) and tokens[at - match - 1] == after[-match - 1]:
            match += 1
        best = max(best, match)
    return best


def test_the_longest_match_is_that_of_a_search_everywhere() -> None:
    chance = random.Random(0)
    for vocabulary in (2, 5, 40):
        documents = [[chance.randrange(vocabulary) for _ in range(chance.randrange(1, 90))] for _ in range(6)]
        made = corpus(*documents)
        text = [chance.randrange(vocabulary) for _ in range(30)] + documents[2][5:40]
        for end in range(1, len(text) + 1):
            match, at = made.find(text[:end], 12, None)
            expected = brute(made.tokens.tolist(), text[:end], 12)
            assert match == (expected if expected >= SHORTEST else 0) and 12 <= DEPTH
            assert not match or made.tokens[at - match : at].tolist() == text[end - match : end]


def test_a_draft_ends_with_its_document_and_stays_in_the_document_it_began_in() -> None:
    table, begun = Corpora(), [*range(60, 63), 1, 2, 3]
    table.put("a", corpus([*begun, 4, 5, 6, 7], [9, 3, 4, 8, 8]))
    assert table.follow(0, begun, 12, 12) == ([4, 5, 6, 7], 6)
    assert table.follow(0, [0, 3, 4], 12, 12) == ([5, 6, 7], 2), "two tokens are enough near the last match"
    assert table.follow(1, [0, 3, 4], 12, 12) == ([], 0) and table.follow(0, [5, 6, 7], 12, 12) == ([], 3)
    table.put("b", corpus([*begun, 9, 9]))
    table.limit(2, "b")
    assert table.follow(2, begun, 1, 12) == ([9], 6)
    table.put("b", None)
    assert table.follow(2, begun, 3, 12) == ([], 0), "who names one drafts from no other"
    table.release(2)
    assert table.follow(2, begun, 2, 12) == ([4, 5], 6)
    table.limit(3, None)
    assert table.follow(3, begun, 2, 12) == ([], 0), "a private request drafts from the corpus it names alone"


def test_a_corpus_keeps_its_text_until_another_one_has_a_clearly_longer_match() -> None:
    table, quoted = Corpora(), list(range(1, 30))
    table.put("a", corpus(quoted))
    table.put("b", corpus([*range(50, 56), 19, 20, 21, 90]))
    assert table.follow(0, quoted[:10], 1, 12) == ([11], 10)
    assert table.follow(0, [54, 55, 19, 20, 21], 1, 12) == ([22], 3), "three tokens in its corpus, five elsewhere"
    assert table.follow(0, [53, 54, 55, 19, 20, 21], 1, 12) == ([90], 6), "six elsewhere"


@pytest.mark.parametrize("limited", [False, True])
def test_a_private_request_drafts_from_its_own_text_and_the_corpus_that_it_names(limited: bool) -> None:
    drafter = NgramDrafter(NgramOptions(nodes=4), limited)
    drafter.corpora.put("c", corpus(list(range(28, 36))))
    drafter.observe(1, [1, 2, 3, 4, 5])
    drafter.hint(2, Hints(private=True))
    drafter.hint(3, Hints(private=True, corpus="c"))
    drafter.observe(2, [11, 12, 13, 14, 11, 12, 13])
    drafter.observe(3, [9, *range(28, 34)])

    def drafted() -> list[list[int]]:
        drafter._debt = -1e9  # or there is no time to look at what others wrote
        return [draft.tokens[1:] for draft in drafter.draft([1, 2, 3])]

    assert drafted()[1:] == [[14, 11, 12], [34, 35]], "its own text, and the corpus it names"
    drafter.observe(2, list(range(28, 34)))
    assert drafted()[1] == [], "not the corpus that it does not name"
    drafter.observe(2, [2, 3])
    drafter.observe(1, [12, 13])
    drafter.observe(3, [14, 13])
    assert drafted() == [[], [], []], "nobody drafts from another's text"
    drafter.release(2)
    drafter.observe(2, [3, 14, 13])
    assert drafted()[1] == [], "a slot's next request neither"


WISHES = [SamplingParams(temperature=heat, sampling_seed=seed, max_new_tokens=40)
          for seed, heat in enumerate((0.0, 0.0, 1.0, 0.7, 0.0, 1.2, 0.0, 0.0))]  # fmt: skip
PROMPTS = [[1, 2, 3 + i, 7, 9 * i % 50] for i in range(8)]


@pytest.fixture(scope="module")
def tiny_llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    """A model of random weights that drafts from texts alone."""
    folder = tmp_path_factory.mktemp("m")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return LLM(folder, speculative_algorithm="NGRAM", speculative_num_draft_tokens=8, max_running_requests=8,
               **{**DUMMY, "device": "cpu"})  # fmt: skip


def test_texts_are_the_same_with_corpora_that_come_and_go_and_earlier_answers_double_the_accept_length(
    tiny_llm: LLM,
) -> None:
    scheduler, table = tiny_llm.scheduler, tiny_llm.scheduler.engine.drafter.corpora
    assert table is not None

    def run(
        wishes: list[SamplingParams], change: int | None = None, salt: str = ""
    ) -> tuple[list[list[int]], float, list[float]]:
        """Return the texts and the accept length, of all and of each; after `change` steps the corpora are removed."""
        assert scheduler.flush_cache()
        requests = [tiny_llm.request(ids, wish) for ids, wish in zip(PROMPTS, wishes, strict=True)]
        for i, request in enumerate(requests):
            request.salt = salt and f"{salt} {i}"
            scheduler.validate(request)
            scheduler.submit(request)
        steps = 0
        while scheduler.has_work:
            scheduler.step()
            steps += 1
            if steps == change:
                table.put("mine", None)
        lengths = [request.verified.accept_length for request in requests]
        return [request.output_ids for request in requests], scheduler.metrics.verified.accept_length, lengths

    plain, cold, _ = run(WISHES)
    answers = corpus(*([*ids, *text] for ids, text in zip(PROMPTS, plain, strict=True)))
    table.put("mine", answers)
    table.put("other", corpus([random.Random(1).randrange(50) for _ in range(500)]))
    texts, warm, each = run(WISHES)
    assert texts == plain and warm >= 2 * cold, (warm, cold)
    named = [SamplingParams(**{**vars(wish), "ngram_corpus_id": "other" if i % 2 else "mine"})
             for i, wish in enumerate(WISHES)]  # fmt: skip
    texts, _, mixed = run(named)
    assert texts == plain and mixed[::2] == each[::2] and max(mixed[1::2]) < 2 < min(each), "a name is a limit"
    texts, salted, _ = run(WISHES, salt="of")
    assert texts == plain and salted < 2, "without a name a salt shuts corpora out"
    texts, _, mixed = run(named, salt="of")
    assert texts == plain and mixed[::2] == each[::2] and max(mixed[1::2]) < 2, "with a name it does not"
    assert run(WISHES, change=4)[0] == plain and "mine" not in table
    table.put("other", None)


def removed_in_the_middle(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove a corpus that eight requests draft from: they draft from it no more, its memory is free, texts stay."""
    scheduler, library, drafted = llm.scheduler, llm.corpora, [False]
    propose = scheduler.engine.host_drafts

    def noted(slots: list[int]) -> list[Draft]:
        found = propose(slots)
        drafted[0] |= any(draft.corpus for draft in found)
        return found

    def steps(count: int) -> bool:
        """Return whether a tree of a corpus was offered in so many steps."""
        drafted[0] = False
        for _ in range(count):
            scheduler.step()
        return drafted[0]

    def mapped() -> bool:
        return "minispec-corpora" in Path("/proc/self/maps").read_text()

    monkeypatch.setattr(scheduler.engine, "host_drafts", noted)
    texts: list[list[list[int]]] = []
    for change in (False, True):
        assert scheduler.flush_cache() and not mapped()
        if change:
            told = [[*ids, *text, END] for ids, text in zip(PROMPTS, texts[0], strict=True)]
            library._built("mine", np.array([token for text in told for token in text], np.int32), "documents")
        requests = [llm.request(ids, wish) for ids, wish in zip(PROMPTS, WISHES, strict=True)]
        for request in requests:
            scheduler.validate(request)
            scheduler.submit(request)
        assert steps(4) == change == mapped()
        if change:
            library.remove("mine")
            assert len(scheduler.running) == 8 and not mapped(), "its pages are given back while requests go on"
        assert not steps(200) and not scheduler.has_work
        texts.append([request.output_ids for request in requests])
    assert texts[0] == texts[1]


def what_was_removed_is_kept(patch: pytest.MonkeyPatch) -> None:
    """The table drops the name and keeps the arrays."""
    kept, put = [], Corpora.put
    patch.setattr(Corpora, "put", lambda self, name, corpus: (kept.append(dict(self._all)), put(self, name, corpus)))


def requests_keep_their_corpus(patch: pytest.MonkeyPatch) -> None:
    """A request that has drafted from a corpus holds the table in which it found it."""
    held, follow = {}, Corpora.follow

    def followed(self: Corpora, slot: int, *rest: Any) -> Any:
        now = self._all
        self._all = held.setdefault(slot, now) if slot in self._last else now
        try:
            return follow(self, slot, *rest)
        finally:
            self._all = now

    patch.setattr(Corpora, "follow", followed)


@pytest.mark.parametrize("fault", [None, what_was_removed_is_kept, requests_keep_their_corpus])
def test_a_corpus_that_is_removed_under_its_requests_is_gone(
    tiny_llm: LLM, fault: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if fault is None:
        removed_in_the_middle(tiny_llm, monkeypatch)
        return
    fault(monkeypatch)
    with pytest.raises(AssertionError):
        removed_in_the_middle(tiny_llm, monkeypatch)
    tiny_llm.scheduler.abort("")


def test_a_library_checks_ids_files_and_sizes(tiny_llm: LLM, tmp_path: Path) -> None:
    library = tiny_llm.corpora
    (root := tmp_path / "root").mkdir()
    (root / "good.jsonl").write_text('"hello there"\n{"text": "you"}\n\n')
    (root / "bad.jsonl").write_text('{"texts": 1}\n')
    (tmp_path / "secret.jsonl").write_text('"secret"\n')
    (root / "link.jsonl").symlink_to(tmp_path / "secret.jsonl")
    os.mkfifo(root / "pipe")

    def refused(*given: Any) -> str:
        with pytest.raises(RequestError) as said:
            library.add(*given)
        return str(said.value)

    assert "--speculative-ngram-corpus-folder" in refused("x", None, "good.jsonl")
    library.root = str(root)
    for path in ("link.jsonl", "../secret.jsonl", str(tmp_path / "secret.jsonl"), "pipe", ".", "none", "a\0b"):
        assert refused("x", None, path).startswith("file_path must be a file below the folder of --speculative-ngram")
    assert "line 1 must be a JSON string" in refused("x", None, "bad.jsonl")
    assert library.add("x", None, "good.jsonl") == ("x", 14) and library.counts == {"x": 14}
    assert "give documents" in refused("x", None, None) and "at least" not in refused("x", ["a"], "b")
    library.most = 20
    assert "must have 1 to 6 tokens" in refused("y", ["too long a text"], None) and "got 0" in refused("y", [], None)
    assert library.add("x", ["twenty tokens at most"[:20]], None) == ("x", 20), "its own id is replaced"
    with pytest.raises(RequestError, match="ngram_corpus_id must be the id of a corpus .x., got 'y'"):
        tiny_llm.generate([1, 2], SamplingParams(ngram_corpus_id="y"))
    tiny_llm.generate([1, 2], SamplingParams(ngram_corpus_id="x", max_new_tokens=2))
    library.remove("x")
    with pytest.raises(RequestError, match="corpus_id must be the id of a corpus"):
        library.remove("x")
    library.most, library.root = 10_000_000, None


SERVED = {"speculative_algorithm": "NGRAM", "admin_api_key": "admin"}


def test_the_endpoints_need_the_admin_key_and_a_request_may_name_a_corpus(served: Any) -> None:
    ask = lambda path, body=None: served.call(path, body, headers={"Authorization": "Bearer admin"})  # noqa: E731
    assert served.call("/add_external_corpus", {"documents": ["x"]})[0] == 403
    assert served.call("/list_external_corpora")[0] == 403
    status, added, _ = ask("/add_external_corpus", {"documents": ["Once upon a time there was a fox."]})
    assert status == 200 and added["success"] and added["loaded_token_count"] > 5
    name = added["corpus_id"]
    assert ask("/list_external_corpora")[1]["corpus_token_counts"] == {name: added["loaded_token_count"]}
    chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4, "ngram_corpus_id": name}
    assert served.call("/v1/chat/completions", chat)[0] == 200
    wish = {"text": "x", "sampling_params": {"max_new_tokens": 2, "ngram_corpus_id": "nobody"}}
    status, said, _ = served.call("/generate", wish)
    assert status == 400 and "ngram_corpus_id must be the id" in said["error"]["message"]
    assert ask("/add_external_corpus", {"documents": ["x"], "file_path": "/etc/passwd"})[0] == 400
    assert ask("/add_external_corpus", {"file_path": "/etc/passwd"})[0] == 400
    assert ask("/remove_external_corpus", {"corpus_id": name})[0] == 200
    assert ask("/remove_external_corpus", {"corpus_id": name})[0] == 400


def test_what_a_server_learned_is_saved_for_the_next_one_but_nothing_with_a_salt(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    folder = tmp_path / "deep" / "learned"
    options = {**DUMMY, "device": "cpu", "speculative_algorithm": "NGRAM"}
    first = LLM(tmp_path, **options, speculative_ngram_learned_folder=str(folder))
    assert os.listdir(folder) == [] and first.corpora.counts == {}

    def ended(prompt: list[int], output: list[int], salt: str = "") -> Request:
        return Request("r", prompt, SamplingParams(), output_ids=output, salt=salt)

    said = [ended([1, 2, 3], [4, 5, 6, 7]), ended([9], [8]), ended([40, 41, 42], [43, 44], "mine"), ended([30], []),
            ended([1, 2, 3, 4, 5, 6, 7], [11, 12]), ended([9], [8])]  # fmt: skip
    for request in said:
        first.corpora.learn(request)
    first.corpora.save()
    (file,) = folder.iterdir()
    assert file.stat().st_mode & 0o777 == 0o600
    assert np.load(file)["tokens"].tolist() == [1, 2, 3, 4, 5, 6, 7, 11, 12, END, 9, 8, END], "a text is kept once"
    LLM(tmp_path, **options).corpora.save()  # without the flag nothing is
    second = LLM(tmp_path, **options, speculative_ngram_learned_folder=str(folder)).corpora
    table = second.table
    assert second.counts == {"learned": 11} and isinstance(table, Corpora)
    assert table.follow(1, [1, 2, 3, 4, 5], 9, 12) == ([6, 7, 11, 12], 5)
    second.learn(ended([20, 21], [22]))
    second.most = 6
    second.learn(ended([23, 24], [25]))
    second.save()
    assert np.load(file)["tokens"].tolist() == [23, 24, 25, END], "the oldest go first"
    second.remove("learned")
    second.save()
    assert np.load(file)["tokens"].tolist() == [], "what is removed does not come back"
    np.savez(file, tokens=np.array([1, END], np.int32), tokenizer=np.array("another"))
    assert LLM(tmp_path, **options, speculative_ngram_learned_folder=str(folder)).corpora.counts == {}
    file.write_bytes(b"no such file")
    assert LLM(tmp_path, **options, speculative_ngram_learned_folder=str(folder)).corpora.counts == {}
    with pytest.raises(ValueError, match="--speculative-ngram-learned-folder .*: Not a directory|File exists"):
        LLM(tmp_path, **options, speculative_ngram_learned_folder=str(file))


def test_a_flag_names_a_corpus_at_start_and_a_server_without_lookups_says_so(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (texts := tmp_path / "texts.jsonl").write_text('"one text"\n')
    options = {**DUMMY, "device": "cpu", "speculative_ngram_external_corpus_path": str(texts)}
    assert LLM(tmp_path, speculative_algorithm="NGRAM", **options).corpora.counts == {"external": 8}
    with pytest.raises(ValueError, match="this server looks nothing up"):
        LLM(tmp_path, **options)
    assert Config(**options).speculative_ngram_external_corpus_max_tokens == 10_000_000
