"""Training draft heads: `python -m minispec.train eagle3 --out FOLDER`, from no data at all to a head that serves.

The target writes replies to openly licensed prompts (`corpus.py`), and a head learns to predict them (`trainer.py`).
The module that is trained is the module that is served, and it is trained on its own drafts (`rounds.py`).

    python -m minispec.train eagle3      EAGLE-3, with a draft vocabulary of its own
    python -m minispec.train eagle       EAGLE-2; its state must also imitate the target's features
    python -m minispec.train mtp         a layer in MiMo's format
    python -m minispec.train dflash      a network in z-lab's format that drafts a whole block in one pass
    python -m minispec.train dspark      one in DeepSeek's format, whose drafts follow from each other
    python -m minispec.train standalone  a small model with the target's vocabulary, a demonstration
    python -m minispec.train token-map   the most frequent tokens, for FR-Spec (arXiv 2502.14856)
    python -m minispec.train replies     the replies alone, in shards that `--replies FOLDER` gives to the others

Read next: `corpus.py` for where the replies come from, `rounds.py` and `blocks.py` for what is learned from them.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import save_file

from minispec.config import Config
from minispec.cpu.linear import can_pack, pack_linears
from minispec.dflash import DFlashConfig, DFlashHead
from minispec.dspark import DSparkHead
from minispec.llm import LLM
from minispec.load.build import Build, choose_device, choose_dtype, choose_folder
from minispec.load.default_model import DefaultModelError
from minispec.load.draft_models import tokenizer_digest
from minispec.load.heads import KINDS as HEADS
from minispec.load.machine import keep_freed_memory
from minispec.load.tokenizer import load_tokenizer
from minispec.model import FINAL, Model, ModelConfig
from minispec.train.blocks import WEIGHTS, BlockTrainer
from minispec.train.corpus import Features, TrainingReply, begin_replies, generate, groups, groups_done, read_replies
from minispec.train.export import BlockRecipe, Recipe, draft_vocabulary, export, read_start, spare_token
from minispec.train.prompts import Tell, collect, read_jsonl
from minispec.train.shards import read_shards, restore, write_shards
from minispec.train.small import export_small, small_model, train_small
from minispec.train.trainer import Trainer

KINDS = (*HEADS, "standalone", "token-map", "replies")
FEATURE_WEIGHT = {"eagle": 1.0}  # the target's LM head reads its state, which so must come close to the target's
ON_CPU = {"count": 3000, "max_new_tokens": 96, "long_share": 0.25, "rounds": 2, "epochs": 4, "batch_tokens": 500}
ON_CUDA = {"count": 100_000, "max_new_tokens": 512, "long_share": 1.0, "rounds": 5, "epochs": 3, "batch_tokens": 32768}
RATE = {"standalone": 2e-3, "dflash": 6e-4, "dspark": 6e-4}  # 1e-3 for the others
LONG = 768  # prompt tokens from which on a conversation counts as long
# The engine that writes replies: how many at once, and on a CPU a pool for as many of a thousand tokens, in pages so
# small that the system turn which most prompts begin with is shared.
ENGINE: dict[str, dict[str, Any]] = {
    "cpu": {"max_running_requests": 64, "max_total_tokens": 65536, "page_size": 16},
    "cuda": {"max_running_requests": 256},
}


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    options = _parser().parse_args(argv)
    begun = time.perf_counter()

    def tell(line: str) -> None:
        """Print a line after the minutes that have passed."""
        print(f"{(time.perf_counter() - begun) / 60:6.1f} min  {line}", flush=True)

    try:
        run(options, tell)
    except (ValueError, DefaultModelError) as error:
        sys.exit(f"minispec.train: error: {error}")  # in one line, as the server prints errors


def run(options: argparse.Namespace, tell: Tell) -> None:
    """Make what `options` ask for: replies, features, a head and its files."""
    config = Config(model_path=options.model, device=options.device, speculative_algorithm="NONE")
    device = choose_device(config)
    for name, value in (ON_CUDA if device.type == "cuda" else ON_CPU).items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    recipe = _recipe(options)
    if recipe.start is not None or isinstance(recipe, BlockRecipe):  # what does not fit is refused before hours of work
        check_recipe(recipe, options.mask_token, Build(config, tell).model_config)
    work = options.work or options.out / "work"
    work.mkdir(parents=True, exist_ok=True)
    if options.replies is not None:
        parts = read_shards(options.replies, config.served_name)
    else:
        begin_replies(work / "replies.jsonl", made_with(options, config))
        parts = [ensure_replies(options, config, work / "replies.jsonl", tell)]
    replies = [reply for part in parts for reply in part]
    tell(f"{len(replies)} replies, {sum(len(r.ids) - r.start for r in replies)} reply tokens, "
         f"{sum(len(r.ids) for r in replies)} in all")  # fmt: skip
    if options.kind == "replies":
        return
    model = load_target(config, tell)
    if options.kind == "token-map":
        ids = draft_vocabulary(replies, options.draft_vocab, model.config.vocab_size)
        options.out.mkdir(parents=True, exist_ok=True)
        save_file({"ids": ids.int()}, options.out / "token_map.safetensors")
        tell(f"wrote {options.out / 'token_map.safetensors'}: {len(ids)} ids, most frequent first")
        return
    if options.kind not in HEADS:
        small = small_model(model, options.width)
        right = train_small(recipe, small, replies, tell)
        export_small(small, tokenizer_digest(load_tokenizer(choose_folder(config, tell))), options.out)
        tell(f"held out: {right:.3f} of reply tokens foreseen; wrote {options.out}")
        return
    taps: tuple[int | str, ...] = (2, model.config.layers // 2, model.config.layers - 3, FINAL)
    features = Features(model, replies, taps, work, options.feature_gigabytes * 10**9)
    recipe = with_mask(recipe, options.mask_token, replies, model.config)
    make = BlockTrainer if isinstance(recipe, BlockRecipe) else Trainer
    trainer = make(recipe, features, options.out, tell, [len(part) for part in parts])
    trainer.run()
    export(trainer.head, model, options.out)
    lengths = ", ".join(f"{trainer.accept_length(rounds):.2f} with {rounds}" for rounds in trainer.depths)
    tell(f"held out ({len(trainer.held_out)} greedy replies), accept length drafting chains: {lengths}")
    mapped = f" --speculative-token-map {options.out}/token_map.safetensors" if make is BlockTrainer else ""
    tell(f"wrote {options.out}; serve it with --speculative-draft-model-path {options.out}{mapped}")


def _recipe(options: argparse.Namespace) -> Recipe:
    """Return how `options` say to train: they have most of a recipe's fields, and others follow from the kind."""
    make = BlockRecipe if options.kind in (DFlashHead.name, DSparkHead.name) else Recipe
    if options.block_size is None:
        options.block_size = 7 if options.kind == DSparkHead.name else 8
    given = {field.name: getattr(options, field.name) for field in fields(make) if hasattr(options, field.name)}
    given["learning_rate"] = options.learning_rate or RATE.get(options.kind, 1e-3)
    given["feature_weight"] = FEATURE_WEIGHT.get(options.kind, 0.0)
    given["start"] = None if options.start is None else str(options.start)
    if make is BlockRecipe:
        drafts = options.block_size - (options.kind == DFlashHead.name)
        given |= {"rounds": drafts, "mask_token": BlockRecipe.mask_token}  # until `with_mask`
    return make(**given)


def check_recipe(recipe: Recipe, mask: int | None, model: ModelConfig) -> None:
    """Raise ValueError naming the flag if the mask, or the head to start from, does not fit the target."""
    read_start(recipe, model)
    if not isinstance(recipe, BlockRecipe):
        return
    if model.layers < 5:
        raise ValueError(f"{recipe.kind} needs a target of at least 5 layers, and this one has {model.layers}")
    if mask is not None and not 0 <= mask < model.vocab_size:
        raise ValueError(f"--mask-token must be in [0, {model.vocab_size - 1}], got {mask}")


def with_mask(recipe: Recipe, given: int | None, replies: Sequence[TrainingReply], model: ModelConfig) -> Recipe:
    """Return the recipe, of a block drafter with the id of its mask: as given, else the start's, else a spare one."""
    if not isinstance(recipe, BlockRecipe):
        return recipe
    if given is None and (start := read_start(recipe, model)):
        given = cast(DFlashConfig, start.config).mask_token
    return replace(recipe, mask_token=spare_token(replies, model.vocab_size) if given is None else given)


def made_with(options: argparse.Namespace, config: Config) -> dict[str, object]:
    """Return what the replies depend on, by flag; the dtype, which the device decides and no flag, as "dtype"."""
    dtype = choose_dtype(config, choose_device(config))
    made: dict[str, object] = {"--model": config.served_name, "dtype": str(dtype).removeprefix("torch.")}
    if options.prompts is None:
        made["--count"] = options.count
    elif options.prompts.is_file():
        digest = hashlib.sha256(options.prompts.read_bytes()).hexdigest()
        made["--prompts"] = f"{options.prompts.name} (sha256 {digest[:16]})"
    else:
        raise ValueError(f"--prompts {options.prompts} is no file")
    flags = ("--long-share", "--max-new-tokens", "--seed")
    return made | {flag: getattr(options, flag.removeprefix("--").replace("-", "_")) for flag in flags}


def ensure_replies(options: argparse.Namespace, config: Config, path: Path, tell: Tell) -> list[TrainingReply]:
    """Return the replies in a file that `begin_replies` began, after generating those that are missing."""
    tokenizer, shards = load_tokenizer(choose_folder(config, tell)), options.kind == "replies"
    found = read_jsonl(options.prompts) if options.prompts else collect(options.count, options.seed, tell)
    rng, length = random.Random(options.seed), lambda c: len(tokenizer.encode_chat(c.messages))
    short = [c for c in found if length(c) < LONG or rng.random() < options.long_share]
    if shards:
        restore(path, options.out)
    if groups_done(path) < groups(len(short)):
        llm = LLM(config=replace(config, **ENGINE[choose_device(config).type]), progress=tell)
        keep_freed_memory()
        for _ in generate(llm, short, path, seed=options.seed, max_new_tokens=options.max_new_tokens, tell=tell):
            if shards and not write_shards(path, options.out):
                tell(f"{options.out} is full")
                break
        # The target is loaded again to be learned from, beside which there is no room for this one and its pages.
        del llm
        gc.collect()
        torch.cuda.empty_cache()  # does nothing where there is no GPU
    if shards and groups_done(path) == groups(len(short)):
        write_shards(path, options.out, last=True)
    return read_replies(path)


def load_target(config: Config, tell: Tell) -> Model:
    """Return the target without pages and graphs; on a CPU that can, its blocks are packed, which is faster."""
    build = Build(config, tell)
    with torch.no_grad():
        model = build.network()
        if build.device.type == "cpu" and can_pack(build.dtype):
            pack_linears(model.layers, compiled=False)  # a draft head starts with rows of the LM head
    keep_freed_memory()
    return model


def _parser() -> argparse.ArgumentParser:
    """Return the command line's parser."""
    parser = argparse.ArgumentParser(
        prog="python -m minispec.train",
        description="Train a draft head for a model on its own replies to openly licensed prompts.",
    )
    add = parser.add_argument
    add("kind", choices=KINDS)
    add("--model", help="Hugging Face id, folder or GGUF file of the target; without it the default model")
    add("--out", type=Path, required=True, help="folder for the head or the shards, and, unless --work, for data")
    add("--work", type=Path, help="folder of replies and features, which several heads can share")
    add("--start", type=Path, help="folder of an exported head to train further, best at a lower --learning-rate")
    add("--prompts", type=Path, help='prompts of your own: JSON lines of {"messages": [...]} or {"prompt": "..."}')
    add("--replies", type=Path, help="folder of shards that the kind replies wrote, to learn from")
    add("--count", type=int, help="conversations to collect (CPU 3000, CUDA 100000)")
    add("--long-share", type=float, help=f"share kept of the prompts beyond {LONG} tokens (CPU 0.25, CUDA 1)")
    add("--max-new-tokens", type=int, help="longest reply (CPU 96, CUDA 512)")
    add("--rounds", type=int, help="rounds of drafting in training (CPU 2, CUDA 5)")
    add("--epochs", type=int, help="how often each reply is learned from (CPU 4, CUDA 3)")
    add("--batch-tokens", type=int, help="reply tokens behind an update (CPU 500, CUDA 32768)")
    add("--learning-rate", type=float, help="highest learning rate (1e-3; standalone 2e-3, dflash and dspark 6e-4)")
    add("--draft-vocab", type=int, default=8192, help="size of the draft vocabulary (default 8192)")
    add("--variant", choices=("3", "3.1"), default="3", help="EAGLE-3 as published, or 3.1 with a norm per stream")
    add("--block-size", type=int, choices=range(2, 33), metavar="{2..32}", help="rows of a block (dflash 8, dspark 7)")
    add("--markov-rank", type=int, default=256, help="rank of the Markov head of a DSpark network (default 256)")
    add("--layers", type=int, default=2, choices=range(1, 17), metavar="{1..16}", help="layers of such a network (2)")
    add("--weights", choices=WEIGHTS, default=WEIGHTS[0], help="of a block's rows: the paper's, or D-PACE's")
    add("--mask-token", type=int, help="id that stands for what is to be drafted (default: one that no reply has)")
    add("--width", type=int, default=128, help="hidden size of a standalone model (default 128)")
    add("--feature-gigabytes", type=int, default=8, help="features kept on disk (default 8); others are recomputed")
    add("--seed", type=int, default=0)
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    return parser


if __name__ == "__main__":
    main()
