"""The command line of a training run, read into workload options."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from autockpt.diagnose import flags
from autockpt.errors import UsageError
from autockpt.schema.diagnosis import CommandReading, Taken
from autockpt.schema.workload import as_option

_OFF = {"false", "0", "no", "none", "off", "null", ""}
_BESIDE_A_PLAN = "next to a plan it is to be off"
_NUMBER = re.compile(r"[0-9]{1,9}")
_FLAG = re.compile(r"--?[A-Za-z][\w.\-]*(?:=.*)?", re.DOTALL)
_LARGEST_FILE = 1 << 20
TRAINER_BATCH, TRL_LENGTH = 8, 1024  # TrainingArguments and SFTConfig, where nothing is said
TRAINER_NORM = 1.0


def read_command(
    text: str, given: Mapping[str, Any] | None = None, *, logged_stage: int | None = None
) -> CommandReading:
    """What a training command says about memory. Nothing is run; configuration files that it names are read.

    ``given`` are workload options that were given beside it: they count, and what they overrule is told.
    ``logged_stage`` is the ZeRO stage that its log tells of. Raises UsageError for a line that no shell would take, or
    flags that contradict one another.
    """
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise UsageError(f"--run cannot be read: {str(error).lower()}", remedy="Quote it as one argument.") from None
    if not words:
        raise UsageError("--run is empty", remedy='Give the whole command: --run "python train.py --bf16 …".')
    return _Reader(text, words, given or {}, logged_stage).read()


@dataclass
class _Reader:
    """What was found so far, by the names of CommandReading's fields, and the flags that it was found in."""

    command: str
    words: list[str]
    given: Mapping[str, Any]
    logged_stage: int | None
    options: dict[str, Any] = field(default_factory=dict)
    taken: list[Taken] = field(default_factory=list)
    overruled: list[str] = field(default_factory=list)
    not_understood: list[str] = field(default_factory=list)
    harmless: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    used: set[str] = field(default_factory=set)
    world: int = 1
    recompute: bool = False
    values: dict[str, str] = field(default_factory=dict)

    def read(self) -> CommandReading:
        self.values = self._values()
        self._world()
        self._first(flags.MODEL, "model")
        self._first(flags.ATTENTION, "attn")
        self._titan_model()
        self._number(flags.BATCH, "batch_size")
        self._number(flags.LENGTH, "seq_len")
        self._number(flags.ACCUMULATE, "accumulate")
        self._first(flags.NORM, "max_grad_norm", _norm)
        self._types()
        self._optimizer()
        self._lora()
        self._quantised()
        self._recompute()
        self._switch(flags.PACKED, "packed", "sequences without padding")
        if find_spec("liger_kernel") is not None:
            self._switch(flags.LIGER, "liger", "Liger Kernel's kernels")
        self._sharding()
        self._defaults()
        self._rest()
        return CommandReading.model_validate({name: getattr(self, name) for name in CommandReading.model_fields})

    def _values(self) -> dict[str, str]:
        """Flags with their values; of one given twice the last counts, as with argparse."""
        values: dict[str, str] = {}
        for name, value in self._pairs():
            if name in values and values[name] != value:
                self.notes.append(f"--{name} is given twice: the last, {value or 'on'}, counts")
            values[name] = value
        for path in self._files():
            for name, value in _of_file(path, self.notes).items():
                values.setdefault(name, value)
        return values

    def _pairs(self) -> Iterator[tuple[str, str]]:
        index = 0
        while index < len(self.words):
            word = self.words[index]
            index += 1
            if not _FLAG.fullmatch(word) or (word.startswith("-") and not word.startswith("--") and len(word) > 2):
                continue
            name, equals, value = word.lstrip("-").partition("=")
            name = name.replace("-", "_")
            if not equals:
                value = "true"
                follows = self.words[index] if index < len(self.words) else "--end"
                # the script of a launcher is no switch's value
                is_word = name not in flags.SWITCHES or follows.lower() in {"true", *_OFF}
                if not _FLAG.fullmatch(follows) and is_word and not follows.endswith(".py"):
                    value, index = follows, index + 1
                    # several values: --fsdp "full_shard auto_wrap" or --fsdp full_shard auto_wrap
                    while index < len(self.words) and name in ("fsdp", "report_to"):
                        if _FLAG.fullmatch(self.words[index]):
                            break
                        value, index = f"{value} {self.words[index]}", index + 1
            switched = name.removeprefix("no_")
            if switched != name and switched in flags.SWITCHES and value == "true":
                name, value = switched, "false"  # --no_gradient_checkpointing, of transformers' HfArgumentParser
            if word.startswith("--"):
                yield name, value

    def _files(self) -> Iterator[Path]:
        """Configuration files that the command names: an axolotl YAML, transformers' arguments as JSON."""
        previous = ""
        for word in self.words:
            path = Path(word)
            if word.endswith((".yaml", ".yml", ".json")) and previous not in ("--deepspeed", "--config_file"):
                if path.is_file() and path.stat().st_size <= _LARGEST_FILE:
                    yield path
                elif not word.startswith("-"):
                    self.missing.append(f"{word} is not here, so what it sets is not known")
            previous = word.partition("=")[0] if word.startswith("--") else ""

    def _take(self, flag: str, option: str, value: Any, note: str = "") -> None:
        self.used.add(flag)
        if option in self.given and self.given[option] != value:
            self.overruled.append(f"--{flag} {self._said(flag)}: {_option(option, self.given[option])} was given")
            return
        if option in self.options:
            return
        self.options[option] = value
        self.taken.append(Taken(flag=f"--{flag} {self._said(flag)}".strip(), option=_option(option, value), note=note))

    def _said(self, flag: str) -> str:
        value = self.values.get(flag, "")
        return "" if value == "true" else value[:80]

    def _present(self, names: tuple[str, ...]) -> str | None:
        """The first of these flags that is there, which is used then."""
        flag = next((n for n in names if n in self.values), None)
        self.used.update([flag] if flag is not None else ())
        return flag

    def _first(self, names: tuple[str, ...], option: str, read: Callable[[str], Any] = str) -> None:
        """Take the first of these flags that is there, where ``read`` makes something of its value."""
        if (flag := self._present(names)) is not None and (value := read(self.values[flag])) is not None:
            self._take(flag, option, value)

    def _number(self, names: tuple[str, ...], option: str) -> None:
        for flag in names:
            value = self.values.get(flag)
            if value is None:
                continue
            if not _NUMBER.fullmatch(value) or int(value) < 1:
                self.used.add(flag)
                self.notes.append(f"--{flag} {value} is no number, so it is left out")
                continue
            self._take(flag, option, int(value))
            return

    def _switch(self, names: tuple[str, ...], option: str, note: str) -> None:
        self.used.update(names)
        for flag in filter(self._on, names):
            self._take(flag, option, True, note)

    def _on(self, flag: str) -> bool:
        return self.values.get(flag, "false").lower() not in _OFF

    def _world(self) -> None:
        for names in (flags.WORLD, flags.NODES):
            value = self.values.get(self._present(names) or "", "")
            self.world *= int(value) if _NUMBER.fullmatch(value) and int(value) else 1

    def _titan_model(self) -> None:
        name, flavor = self.values.get("model.name", ""), self.values.get("model.flavor", "")
        if name and flavor:
            self.used |= {"model.name", "model.flavor"}
            if name.startswith("llama"):
                note = f"torchtitan's {name} {flavor}, as the built-in shape"
                self._take("model.flavor", "model", f"llama-{flavor.lower()}", note)

    def _types(self) -> None:
        half, brain = self._on("fp16"), self._on("bf16")
        self.used |= {"fp16", "bf16"}
        if half and brain:
            raise UsageError("--run has both --bf16 and --fp16", remedy="A run computes in one of them: leave one out.")
        if brain:
            self._take("bf16", "autocast", "bf16", "weights stay in the type that they are loaded in")
        elif half:
            self._take("fp16", "autocast", "fp16")
            self._take("fp16", "scaler", True)
        mixed = self.values.get("mixed_precision", "").lower()
        if mixed in ("bf16", "fp16"):
            self._take("mixed_precision", "autocast", mixed)
        self._first(flags.WEIGHT_DTYPE, "dtype", lambda name: flags.DTYPES.get(name.rsplit(".", 1)[-1].lower()))

    def _optimizer(self) -> None:
        if (flag := self._present(flags.OPTIMIZER)) is None:
            return
        name = self.values[flag].lower()
        if (known := flags.OPTIMIZERS.get(name)) is None:
            self.notes.append(f"--{flag} {name} is not modelled: AdamW's states are counted")
            return
        paged = "pages of its states may lie on the host" if name.startswith("paged") else ""
        self._take(flag, "optimizer", known, paged)

    def _lora(self) -> None:
        on = next(filter(self._on, flags.LORA_ON), None)
        rank_flag = self._present(flags.LORA_RANK)
        self.used |= {*flags.LORA_ON, *flags.LORA_RANK}
        switched_off = any(f in self.values and not self._on(f) for f in flags.LORA_ON)
        if on is None and (rank_flag is None or switched_off):
            return
        value = self.values.get(rank_flag or "", "")
        rank = int(value) if _NUMBER.fullmatch(value) else 0
        given = f"{value} is no rank" if rank_flag else "no rank was given"
        self._take(rank_flag or on or "lora", "lora", rank or 16, "" if rank else f"{given}: 16 is assumed")
        self._adapters()

    def _adapters(self) -> None:
        """Which layers have adapters, and of what kind."""
        targets = self._present(flags.LORA_TARGETS)
        if targets is not None:
            said = self.values[targets]
            self._take(targets, "lora_targets", "all-linear" if said.lower() in ("all", "all-linear") else said)
        elif (flag := self._present(flags.LORA_EVERYWHERE)) is not None and self._on(flag):
            self._take(flag, "lora_targets", "all-linear")
        if (flag := self._present(flags.LORA_WHOLE)) is not None and self._on(flag):
            self._take(flag, "lora_modules_to_save", self.values[flag])
        self._switch(flags.DORA, "lora_dora", "")

    def _quantised(self) -> None:
        """Base weights in 4 or 8 bits, which train adapters alone."""
        self.used |= {*flags.LOADED_IN, *flags.QUANTISED_HOW}
        for flag, option in flags.LOADED_IN.items():
            bits = self.values.get(flag, "")
            wanted = option if option and self._on(flag) else {"4": "load_in_4bit", "8": "load_in_8bit"}.get(bits, "")
            if wanted:
                self._take(flag, wanted, True, "NF4, quantised twice" if wanted == "load_in_4bit" else "")
        qlora = next((f for f in flags.LORA_ON if self.values.get(f, "").lower() == "qlora"), None)
        if qlora is not None:
            self._take(qlora, "load_in_4bit", True, "NF4, quantised twice")
        quantised = {"load_in_4bit", "load_in_8bit"} & set(self.options)
        if quantised and "lora" not in self.options and "lora" not in self.given:
            self._take(quantised.pop(), "lora", 16, "quantised weights train adapters alone: rank 16 is assumed")

    def _recompute(self) -> None:
        if (flag := self._present(flags.RECOMPUTE)) is not None:
            self.recompute = self._on(flag)
            if self.recompute:
                self.taken.append(
                    Taken(flag=f"--{flag}", option=f"every layer recomputed, in what the run needed; {_BESIDE_A_PLAN}")
                )
        elif self._uses_trl():
            self.recompute = True
            self.notes.append(
                f"TRL switches gradient checkpointing on where nothing is said: it is taken to be on; {_BESIDE_A_PLAN}"
            )

    def _sharding(self) -> None:
        stage, degree = self._zero_stage(), "parallelism.data_parallel_shard_degree"
        fsdp, shard = self.values.get("fsdp", "").lower(), self.values.get(degree, "")
        self.used |= {"fsdp", "fsdp_config", "use_fsdp", degree}
        if _NUMBER.fullmatch(shard) and int(shard) > 1:
            self._take(degree, "shard", int(shard))
        elif stage == 3 or "full_shard" in fsdp or (self._on("use_fsdp") and not fsdp):
            flag = "deepspeed" if stage == 3 else "fsdp" if fsdp else "use_fsdp"
            if self.world > 1:
                self._take(flag, "shard", self.world, f"over all {self.world} ranks")
            else:
                self.notes.append(f"--{flag} shards, but over how many ranks is not said: add --shard N")
        elif stage in (1, 2) or "shard_grad_op" in fsdp:
            self.notes.append(
                "sharding of gradients and states alone (ZeRO-1, ZeRO-2) is not modelled: they are counted whole"
            )
        elif self.world > 1:
            flag = self._present(flags.WORLD) or "world_size"
            self._take(flag, "ddp", "buckets", "DistributedDataParallel's buckets")

    def _zero_stage(self) -> int | None:
        value = self.values.get("deepspeed") or self.values.get("zero_stage")
        self.used |= {"deepspeed", "zero_stage"}
        if value is None:
            if self.logged_stage is not None:
                self.notes.append(f"the log says that DeepSpeed ran ZeRO stage {self.logged_stage}")
            return self.logged_stage
        if value in ("0", "1", "2", "3"):
            return int(value)
        path = Path(value)
        if path.is_file() and path.stat().st_size <= _LARGEST_FILE:
            section = _json(path).get("zero_optimization", {})
            section = section if isinstance(section, dict) else {}
            stage = section.get("stage", 0)
            if section.get("offload_optimizer") or section.get("offload_param"):
                self.notes.append(flags.NOT_MODELLED["cpu_offload"])
            return stage if isinstance(stage, int) else None
        if self.logged_stage is not None:
            self.missing.append(f"{value} is not here: the log says ZeRO stage {self.logged_stage}")
            return self.logged_stage
        if (match := re.search(r"(?:zero|stage|z)_?-?([0-3])", value.lower())) is not None:
            self.missing.append(f"{value} is not here: its name says stage {match[1]}")
            return int(match[1])
        self.missing.append(f"{value} is not here, so its sharding is not known: --shard N says it")
        return None

    def _uses_trl(self) -> bool:
        first = (Path(word).name for word in self.words[:6])
        return "trl" in first or any(word.startswith("trl/") for word in self.words)

    def _defaults(self) -> None:
        """What transformers' arguments are where the command says nothing."""
        trainer = {"output_dir", "per_device_train_batch_size", "num_train_epochs", "gradient_accumulation_steps"}
        defaults = [("Trainer", "batch_size", TRAINER_BATCH), ("Trainer", "max_grad_norm", TRAINER_NORM)]
        if self._uses_trl():
            defaults.append(("TRL", "seq_len", TRL_LENGTH))
        elif not trainer & set(self.values):
            return
        for whose, option, value in defaults:
            if option not in self.options and option not in self.given:
                self.options[option] = value
                self.taken.append(Taken(flag=f"({whose}'s default)", option=_option(option, value)))

    def _rest(self) -> None:
        for name, value in self.values.items():
            if name in self.used:
                continue
            if name in flags.NOT_MODELLED:
                if self._on(name) and value != "1":
                    self.notes.append(f"--{name}: {flags.NOT_MODELLED[name]}")
            elif flags.is_harmless(name):
                self.harmless.append(f"--{name}")
            else:
                self.not_understood.append(f"--{name} {'' if value == 'true' else value[:60]}".strip())


def _option(name: str, value: Any) -> str:
    """As ``autockpt`` wants it on its own command line."""
    said = "" if value is True else f" {value:g}" if isinstance(value, float) else f" {value}"
    return as_option(name) + said


def _norm(text: str) -> float | None:
    """What gradients are clipped to; None where they are not."""
    try:
        norm = float(text)
    except ValueError:
        return None
    return norm if 0 < norm < 1e9 else None


def _of_file(path: Path, notes: list[str]) -> dict[str, str]:
    """Settings of a configuration file, as flags; one level of nesting with dots."""
    if path.suffix == ".json":
        loaded = _json(path)
    else:
        import yaml

        try:
            loaded = yaml.safe_load(path.read_text(encoding="utf-8", errors="replace"))
        except yaml.YAMLError:
            loaded = None
    if not isinstance(loaded, dict):
        notes.append(f"{path.name} holds no settings that could be read")
        return {}
    plain = {str(key): value for key, value in loaded.items() if isinstance(value, str | int | float)}
    return {key: str(value).lower() if isinstance(value, bool) else str(value) for key, value in plain.items()}


def _json(path: Path) -> dict[str, Any]:
    try:
        loaded = json.loads(path.read_text(encoding="utf-8", errors="replace"))
    except (ValueError, RecursionError):
        return {}
    return loaded if isinstance(loaded, dict) else {}
