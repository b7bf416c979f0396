"""From a config to a drafter: this file finds the drafter's folder and reads its weights.

`make_drafter` has the one table of drafters. A user's own drafter is named as module:Class, and that class is called as
the entries of the table are. Errors about a draft model name the flag that named the model.

Read next: `drafter.py` for what a drafter is, `tree_shape.py` for its trees, `build.py` for the caller.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, cast

from torch import Tensor

from minispec.attention import most_nodes
from minispec.beam import BeamDrafter
from minispec.config import GROWN, MAX_NODES, Config
from minispec.dflash import DFlashDrafter, DFlashHead
from minispec.drafter import Drafter, HostDrafter, Plain, as_drafter
from minispec.dspark import DSparkDrafter, DSparkHead
from minispec.eagle import DraftHead
from minispec.load.dflash_heads import read_dflash
from minispec.load.draft_models import load_draft
from minispec.load.dspark_heads import read_dspark
from minispec.load.gguf_models import as_folder
from minispec.load.heads import load_head, naming
from minispec.load.token_map import read_token_map
from minispec.load.tokenizer import Tokenizer
from minispec.load.tree_shape import beam_shape, block_shape, lookup_nodes, smaller_nodes, tree_shape
from minispec.load.weights import read_tensors, resolve_file, resolve_model
from minispec.lookup import Lookups
from minispec.model import Model
from minispec.ngram import NgramDrafter, NgramOptions
from minispec.standalone import StandaloneDrafter

logger = logging.getLogger("minispec")


def with_own_head(config: Config, hf_config: Mapping[str, Any], folder: Path, tell: Callable[[str], None]) -> Config:
    """Return the config, with EAGLE if no flag is about speculation and the model brings a head, MiMo's MTP layer.

    SGLang drafts with that layer only if --speculative-algorithm is EAGLE. Here the layer drafts by default, and NONE
    switches it off. A copy of the model whose files lack the layer decodes plainly, as do dummy weights.
    """
    silent = all(getattr(config, f.name) == f.default for f in fields(config) if f.name.startswith("speculative_"))
    named = "MiMoForCausalLM" in (hf_config.get("architectures") or ()) and hf_config.get("num_nextn_predict_layers")
    if not silent or not named or config.load_format == "dummy":
        return config
    layer = read_tensors(folder, config.load_format, wanted=lambda name: "mtp_layers." in name)
    if next(layer, None) is None:
        tell("config.json speaks of an MTP layer, but the files have none: decoding plainly")
        return config
    tell("the model brings an MTP layer and drafts with it; --speculative-algorithm NONE decodes plainly")
    return replace(config, speculative_algorithm="EAGLE")


def make_drafter(config: Config, model: Model, folder: Path, tokenizer: Tokenizer) -> Drafter:
    """Build the drafter that a config asks for; `model` is the target, whose files are in `folder`.

    `module:Class` is not in the table: the class is imported, and called as the entries are. Raises ValueError naming
    the flag if a head or draft model is missing or does not fit target and tokenizer, or if the class is no drafter.
    """
    table: dict[str, Callable[[Config, Model, Path, Tokenizer], Drafter | HostDrafter]] = {
        "NONE": lambda *_: Plain(),
        "NGRAM": _texts,
        "EAGLE": _learned,
        "EAGLE3": _learned,
        "DFLASH": _block,
        "DSPARK": _block,
        "STANDALONE": _standalone,
    }
    if config.speculative_token_map is not None and config.algorithm not in GROWN and not config.is_own_drafter:
        logger.warning("--speculative-token-map is ignored: --speculative-algorithm %s drafts without an LM head",
                       config.algorithm)  # fmt: skip
    make = _own if config.is_own_drafter else table[config.algorithm]
    drafter = make(config, model, folder, tokenizer)
    on_cpu, vocab_size = _on_cpu(config, model), model.config.vocab_size
    if isinstance(drafter, Drafter) and config.may_look_up:
        own, shape = drafter.nodes, tree_shape(config, model.config.architecture, on_cpu)
        # A corpus that comes later may change no shape: what is found in it is a chain, as deep as the trees are.
        always = config.has_lookups(on_cpu)
        nodes = lookup_nodes(config, own) if always else drafter.depth + 1
        drafter = Lookups(drafter, _ngram(config, nodes, limited=True), vocab_size, awaits_corpus=not always)
        drafter.own_nodes = own if isinstance(drafter.head, DFlashDrafter) else shape[2]
    _check_size(config, drafter, model)
    return as_drafter(drafter, vocab_size, smaller_nodes(config, drafter.nodes, on_cpu))


def _check_size(config: Config, drafter: Drafter | HostDrafter, model: Model) -> None:
    """Raise ValueError naming the flag if trees are too large for the device, or too flat for a simulation."""
    flag = f"--speculative-algorithm {config.algorithm}" if config.is_own_drafter else "--speculative-num-draft-tokens"
    device = model.embed_tokens.weight.device
    most = most_nodes(device)
    if drafter.nodes > most:
        raise ValueError(f"{flag}: the draft tree has {drafter.nodes} nodes, but on {device.type} it may have at most "
                         f"{most}")  # fmt: skip
    length, longest = config.simulate_acc_len, drafter.depth + 1
    if length is not None and length > longest:
        raise ValueError(f"--simulate-acc-len must be in [1, {longest}], since a step emits a token more than trees "
                         f"are deep, got {length:g}")  # fmt: skip


def _own(config: Config, *target: object) -> Drafter | HostDrafter:
    """Build the drafter that --speculative-algorithm names as module:Class; errors of its own code pass through."""
    flag = f"--speculative-algorithm {config.algorithm}"
    where, _, name = config.algorithm.partition(":")
    try:
        module = importlib.import_module(where)
    except ModuleNotFoundError as error:
        if error.name is None or f"{where}.".startswith(f"{error.name}."):
            raise ValueError(f"{flag}: there is no module {error.name} on the Python path, which begins with the "
                             "folder the command is started in") from None  # fmt: skip
        raise  # the module exists, but it imports another one that does not
    make = getattr(module, name, None)
    if not callable(make):
        classes = [k for k, v in vars(module).items() if isinstance(v, type) and v.__module__ == where]
        raise ValueError(f"{flag}: {where} has no class {name}; it has {', '.join(classes) or 'none'}")
    if not (isinstance(make, type) and issubclass(make, (Drafter, HostDrafter))):
        raise ValueError(f"{flag}: {name} must derive from HostDrafter or Drafter of minispec/drafter.py")
    if abstract := sorted(make.__abstractmethods__):
        raise ValueError(f"{flag}: {name} lacks the methods {', '.join(abstract)}; see minispec/drafter.py")
    drafter = cast(Callable[..., Any], make)(config, *target)
    if missing := [part for part in ("name", "nodes", "depth") if not hasattr(drafter, part)]:
        raise ValueError(f"{flag}: {name} must set {', '.join(missing)}; see minispec/drafter.py")
    if not 1 <= drafter.nodes <= MAX_NODES or not 0 <= drafter.depth < drafter.nodes:
        raise ValueError(f"{flag}: nodes must be in [1, {MAX_NODES}] and depth in [0, nodes - 1], got {drafter.nodes} "
                         f"and {drafter.depth}")  # fmt: skip
    return drafter


def _learned(config: Config, model: Model, folder: Path, tokenizer: Tokenizer) -> Drafter:
    """Build the drafter around a trained head; the head's files decide which kind of head it is, not the flag."""
    where, architecture = folder, model.config.architecture
    if config.draft_path is not None or architecture != "MiMoForCausalLM":
        where = _draft_folder(config, f"this target ({architecture}) brings no draft head of its own")
    ids, bad_map = None, None
    try:
        ids = _token_map(config, model)
    except ValueError as error:  # raised below, if the head's files show that it is of a kind that uses a map
        bad_map = error
    head = load_head(where, model, token_map=ids, load_format=config.draft_load_format)
    if bad_map is not None:
        if head.name != "eagle3":
            raise bad_map
        logger.warning("%s; it is ignored: an EAGLE-3 head has a draft vocabulary of its own", bad_map)
    if head.name != config.algorithm.lower():
        logger.info("--speculative-algorithm %s: the head is of kind %s and used as such", config.algorithm, head.name)
    _tell_positions(config, model, head)
    shape = beam_shape(config, architecture, _on_cpu(config, model))
    if shape["topk"] > head.draft_vocab:
        raise ValueError(f"--speculative-eagle-topk {shape['topk']}: the head drafts {head.draft_vocab} tokens only")
    return BeamDrafter(head, **shape)


def _block(config: Config, model: Model, folder: Path, tokenizer: Tokenizer) -> Drafter:
    """Build the drafter around a network that drafts a block in one pass."""
    kind, read = ("DFlash", read_dflash) if config.algorithm == "DFLASH" else ("DSpark", read_dspark)
    where, ids = _draft_folder(config, f"a {kind} checkpoint made for this target"), _token_map(config, model)
    head = cast(DFlashHead, load_head(where, model, token_map=ids, load_format=config.draft_load_format, read=read))
    _tell_positions(config, model, head)
    shape = block_shape(config, head, _on_cpu(config, model))
    if shape["topk"] > head.draft_vocab:
        raise ValueError(f"--speculative-eagle-topk {shape['topk']}: the draft has {head.draft_vocab} tokens only")
    head.window = window = config.speculative_draft_window_size
    if window is not None and window < shape["block"]:
        raise ValueError(f"--speculative-draft-window-size must be at least {shape['block']}, the rows of the block, "
                         f"got {window}")  # fmt: skip
    if not isinstance(head, DSparkHead):
        return DFlashDrafter(head, **shape)
    threshold = config.speculative_dspark_confidence_threshold
    if threshold and head.confidence_head is None:
        raise ValueError(f"--speculative-dspark-confidence-threshold {threshold:g}: the checkpoint has no confidence "
                         "head; 0 verifies the whole block")  # fmt: skip
    return DSparkDrafter(head, threshold=threshold, **shape)


def _tell_positions(config: Config, model: Model, head: DraftHead) -> None:
    """Log a line if texts may be longer than the head was made for."""
    context = config.context_length or model.config.context_length
    if head.positions < context:
        logger.info("the draft head states %d positions, the context has %d: it drafts on beyond them, perhaps worse",
                    head.positions, context)  # fmt: skip


def _standalone(config: Config, model: Model, folder: Path, tokenizer: Tokenizer) -> Drafter:
    """Build the drafter around a separate draft model."""
    where, ids = _draft_folder(config, "a smaller model with the target's tokenizer"), _token_map(config, model)
    draft = load_draft(where, model, tokenizer, config.context_length, config.draft_load_format, ids)
    shape = beam_shape(config, model.config.architecture, _on_cpu(config, model))
    if shape["topk"] > draft.vocab_size:
        raise ValueError(f"--speculative-eagle-topk {shape['topk']}: the draft has {draft.vocab_size} tokens only")
    return StandaloneDrafter(draft, **shape)


def _ngram(config: Config, nodes: int, limited: bool) -> NgramDrafter:
    """Build the drafter over texts, with trees of at most `nodes` nodes; limited: to a share of the time."""
    shortest, longest, branch, capacity, least, most = config.ngram.values()
    match_type = config.speculative_ngram_match_type
    options = NgramOptions(shortest, longest, least, most, match_type, branch, capacity, nodes)
    return NgramDrafter(options, limited)


def _texts(config: Config, model: Model, *_: object) -> HostDrafter:
    """Build a drafter that only looks texts up; on a CPU within a share of the time, unless flags fix the trees."""
    return _ngram(config, config.draft_tokens, limited=config.several_sizes and _on_cpu(config, model))


def _draft_folder(config: Config, needed: str) -> Path:
    """Return the folder of the draft head or model; raises ValueError naming the flag, and saying what is needed."""
    if (path := config.draft_path) is None:
        raise ValueError(f"--speculative-algorithm {config.algorithm} needs --speculative-draft-model-path: {needed}")
    found = as_folder(path, "--speculative-draft-model-path")
    with naming("--speculative-draft-model-path", path):
        revision, flag = config.speculative_draft_model_revision, "--speculative-draft-model-revision"
        return resolve_model(found, revision, flag, config.download_dir)


def _token_map(config: Config, model: Model) -> Tensor | None:
    """Return the ids of the token map, None if there is no map; raises ValueError naming the flag."""
    if config.token_map is None:
        return None
    with naming("--speculative-token-map", config.token_map):
        file = resolve_file(config.token_map, config.download_dir)
    return read_token_map(file, model.config.vocab_size)


def _on_cpu(config: Config, model: Model) -> bool:
    """Return whether this model, which may be on the meta device (`build.Outline`), is for a CPU."""
    weight = model.embed_tokens.weight
    return (config.device if weight.is_meta else weight.device.type) == "cpu"
