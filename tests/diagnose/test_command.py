from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autockpt.diagnose.command import read_command
from autockpt.errors import UsageError
from autockpt.schema import WorkloadSpec


def options(command: str, **given: Any) -> dict[str, Any]:
    return read_command(command, given).options


def test_transformers_trainer() -> None:
    said = read_command(
        "CUDA_VISIBLE_DEVICES=0 python train.py --model_name_or_path meta-llama/Llama-3.2-1B --bf16 "
        "--per_device_train_batch_size=8 --gradient_accumulation_steps 4 --max_seq_length 2048 --optim adamw_bnb_8bit "
        "--torch_dtype bfloat16 --attn_implementation flash_attention_2 --max_grad_norm 0.5 --gradient_checkpointing "
        "--learning_rate 2e-5 --output_dir out --flux_capacity 3"
    )
    assert said.options == {
        "model": "meta-llama/Llama-3.2-1B",
        "autocast": "bf16",
        "batch_size": 8,
        "accumulate": 4,
        "seq_len": 2048,
        "optimizer": "adamw8bit",
        "dtype": "bf16",
        "attn": "flash_attention_2",
        "max_grad_norm": 0.5,
    }
    assert said.recompute and said.not_understood == ("--flux_capacity 3",)
    assert set(said.harmless) == {"--learning_rate", "--output_dir"}
    assert WorkloadSpec.model_validate(said.options).batch_size == 8


def test_what_transformers_does_where_nothing_is_said() -> None:
    assert options("python train.py --output_dir out") == {"batch_size": 8, "max_grad_norm": 1.0}
    assert options("python mine.py --seq_len 128") == {"seq_len": 128}


def test_trl_and_its_defaults() -> None:
    said = read_command("trl sft --model_name_or_path gpt2 --use_peft --lora_r 32 --per_device_train_batch_size 2")
    assert said.options["lora"] == 32 and said.options["seq_len"] == 1024 and said.recompute
    assert not read_command("trl sft --model_name_or_path gpt2 --gradient_checkpointing false").recompute


@pytest.mark.parametrize("name", ["gradient_checkpointing", "activation_checkpointing", "grad_checkpointing"])
def test_recomputing_every_layer_by_each_of_its_names(name: str) -> None:
    said = read_command(f"python train.py --{name}")
    assert said.recompute and said.taken[0].flag == f"--{name}" and not said.not_understood
    for off in (f"--{name} False", f"--no_{name}", f"--no-{name.replace('_', '-')} train.py"):
        said = read_command(f"trl sft {off}")
        assert not said.recompute and not said.not_understood


def test_an_unknown_flag_at_the_end_is_told_as_it_was_written() -> None:
    assert read_command("python train.py --flux").not_understood == ("--flux",)


def test_fp16_scales_the_loss() -> None:
    assert options("python t.py --fp16 true") == {"autocast": "fp16", "scaler": True}
    assert options("python t.py --bf16 False --fp16 no") == {}


def test_contradictory_flags_are_an_error() -> None:
    with pytest.raises(UsageError, match="both --bf16 and --fp16"):
        read_command("python t.py --bf16 --fp16")


def test_options_that_were_given_count_and_the_flag_is_told() -> None:
    said = read_command("python t.py --batch_size 8 --seq_len 64", {"batch_size": 2, "seq_len": 64})
    assert said.options == {"seq_len": 64}
    assert said.overruled == ("--batch_size 8: --batch-size 2 was given",)


def test_of_a_flag_given_twice_the_last_counts_and_that_is_said() -> None:
    said = read_command("python t.py --batch-size 8 --batch_size 4")
    assert said.options == {"batch_size": 4} and "given twice" in said.notes[0]


@pytest.mark.parametrize(
    ("command", "want"),
    [
        ("torchrun --nproc_per_node 4 t.py --seq_len 8", {"ddp": "buckets", "seq_len": 8}),
        ("torchrun --nproc_per_node=4 --nnodes 2 t.py --fsdp 'full_shard auto_wrap'", {"shard": 8}),
        ("accelerate launch --num_processes 2 --use_fsdp t.py", {"shard": 2}),
        ("deepspeed --num_gpus 8 t.py --deepspeed ds_zero3.json", {"shard": 8}),
        ("torchrun --nproc_per_node 4 t.py --deepspeed zero2.json", {}),
        ("torchrun --nproc_per_node 1 t.py", {}),
    ],
)
def test_sharding_and_ddp(command: str, want: dict[str, Any]) -> None:
    assert options(command) == want


def test_a_deepspeed_file_that_is_there_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": {"stage": 3, "offload_optimizer": {"x": 1}}}))
    said = read_command("deepspeed --num_gpus 2 t.py --deepspeed ds.json")
    assert said.options == {"shard": 2} and any("host" in note for note in said.notes)


def test_an_axolotl_file_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lora.yml").write_text(
        "base_model: gpt2\nadapter: lora\nlora_r: 8\nmicro_batch_size: 2\nsequence_len: 512\nbf16: true\n"
        "optimizer: adamw_8bit\ngradient_checkpointing: true\nsample_packing: true\ndatasets:\n  - path: x\n"
    )
    said = read_command("axolotl train lora.yml")
    assert said.options == {
        "model": "gpt2",
        "batch_size": 2,
        "seq_len": 512,
        "autocast": "bf16",
        "optimizer": "adamw8bit",
        "lora": 8,
        "packed": True,
    }
    assert said.recompute
    assert any("is not here" in said for said in read_command("axolotl train absent.yml").missing)


def test_torchtitan() -> None:
    said = read_command(
        "torchrun --nproc_per_node=8 -m torchtitan.train --model.name llama3 --model.flavor 8B "
        "--training.local_batch_size 2 --training.seq_len 4096 --parallelism.data_parallel_shard_degree 8 "
        "--activation_checkpoint.mode full --training.steps 10"
    )
    assert said.options == {"model": "llama-8b", "batch_size": 2, "seq_len": 4096, "shard": 8}
    assert said.recompute and not said.not_understood


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        ("--cpu_offload", "on the host are not modelled"),
        ("--optim lion_32bit", "not modelled"),
        ("--batch_size much", "no number"),
    ],
)
def test_what_is_not_modelled_is_said(flag: str, said: str) -> None:
    assert any(said in note for note in read_command(f"python t.py {flag}").notes)


@pytest.mark.parametrize(
    ("line", "options"),
    [
        (
            "trl sft --load_in_4bit --use_peft --lora_r 8 --lora_target_modules all-linear --max_length 512",
            {"load_in_4bit": True, "lora": 8, "lora_targets": "all-linear", "seq_len": 512},
        ),
        ("python t.py --load_in_8bit --use_dora --use_lora", {"load_in_8bit": True, "lora": 16, "lora_dora": True}),
        ("python t.py --use_lora --lora_r 0", {"lora": 16}),
        ("llamafactory-cli train --quantization_bit 4", {"load_in_4bit": True, "lora": 16}),
        ("python t.py --adapter qlora --lora_target_linear", {"load_in_4bit": True, "lora_targets": "all-linear"}),
        ("python t.py --load_in_4bit false", {}),
    ],
)
def test_quantised_and_adapted_models_are_counted_as_what_they_are(line: str, options: dict[str, Any]) -> None:
    said = read_command(line)
    assert said.options.items() >= options.items()
    assert ("load_in_4bit" in said.options) == ("load_in_4bit" in options)
    assert not said.not_understood and not any("counted whole" in note for note in said.notes)


@pytest.mark.parametrize("line", ["python 'train.py", "", "   "])
def test_no_shell_would_take_it(line: str) -> None:
    with pytest.raises(UsageError, match="--run"):
        read_command(line)


def test_a_switch_does_not_swallow_the_script() -> None:
    said = read_command("torchrun --standalone train.py --gradient_checkpointing data.json")
    assert said.recompute and "--standalone" in said.harmless


@given(st.lists(st.text(st.characters(codec="ascii", exclude_categories=["Cc"]), max_size=20), max_size=12))
@settings(max_examples=100, deadline=None)
def test_no_line_breaks_the_reader(tmp_path_factory: Any, words: list[str]) -> None:
    try:
        said = read_command("python t.py " + " ".join(words))
    except UsageError:
        return
    assert set(said.options) <= set(WorkloadSpec.model_fields)


def test_the_zero_stage_that_the_log_tells_of_is_not_ddp() -> None:
    command = "torchrun --nproc_per_node 4 train.py --model_name_or_path llama-1b"
    assert read_command(command).options["ddp"] == "buckets"
    said = read_command(command, logged_stage=3)
    assert said.options["shard"] == 4 and "ddp" not in said.options and any("ZeRO stage 3" in n for n in said.notes)
    absent = read_command(f"{command} --deepspeed absent.json", logged_stage=3)
    assert absent.options["shard"] == 4 and "absent.json is not here" in absent.missing[0]


def test_checkpointing_of_the_trainers_own_is_said_to_be_off_next_to_a_plan() -> None:
    named = read_command("python train.py --gradient_checkpointing true")
    assert named.recompute and any("next to a plan it is to be off" in taken.option for taken in named.taken)
    assumed = read_command("trl sft --max_length 64")
    assert assumed.recompute and any("next to a plan it is to be off" in note for note in assumed.notes)
