from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autockpt.errors import PlanError
from autockpt.schema import (
    OFFLOAD,
    RECOMPUTE,
    SAVE,
    Choice,
    Comparison,
    DeviceInfo,
    Environment,
    Measurement,
    Plan,
    Prediction,
    ResolvedBudget,
    Unit,
    WorkloadSpec,
    parse_choice,
    plan_hash,
    words,
)
from autockpt.schema.choices import CHOICE_TYPES, CHUNKED_LOSS, GATHERED, Recompute
from autockpt.schema.plan import NEVER_CALLED, When, applied
from tests.samples import row

RESULTS = Path(__file__).parents[2] / "results"
UNITS = tuple(Unit(name=f"model.layers.{i}", cls="LlamaDecoderLayer", kind=0) for i in range(12)) + tuple(
    Unit(name=f"model.layers.{i}.mlp", cls="LlamaMLP", kind=1, role="mlp", parent=f"model.layers.{i}")
    for i in range(12)
)
BLOCKS = [u.name for u in UNITS if u.role == "block"]
CHOICES: dict[str, Choice] = {n: SAVE if i < 4 else RECOMPUTE if i < 11 else OFFLOAD for i, n in enumerate(BLOCKS)}


def full_plan(choices: dict[str, Choice] | None = None) -> Plan:
    measured = Measurement(peak_bytes=440_000_000, step_seconds=0.448, noise=0.008, steps=20, times=(0.4, 0.5))
    return Plan.create(
        choices or CHOICES,
        UNITS,
        model="llama-tiny",
        source="measured",
        workload=WorkloadSpec(model="llama-tiny", batch_size=4, autocast="bf16"),
        settings={"dtype": "fp32", "parameters": 12_300_000, "padded": True},
        environment=Environment(
            device=DeviceInfo(kind="cpu", name="a processor", capacity_bytes=2**34, threads=2),
            versions={"torch": "2.13.0"},
        ),
        budget=ResolvedBudget(asked="60%act", bytes=450_000_000, covers="everything"),
        predicted=Prediction(peak_bytes=441_000_000, step_seconds=0.451),
        measured=measured,
        baselines=(Comparison(name="none", verdict="over_budget", measured=measured),),
        notes=("a note: with a colon", "off"),
    )


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "plan.yaml"
    path.write_text(text)
    return path


def test_a_plan_round_trips_through_its_file(tmp_path: Path) -> None:
    plan = full_plan()
    plan.save(tmp_path / "plan.yaml")
    loaded = Plan.load(tmp_path / "plan.yaml")
    assert loaded == plan and loaded.status == "measured"
    assert loaded.expand(u.name for u in UNITS) == CHOICES
    loaded.check_structure(UNITS)


def test_the_file_is_for_people(tmp_path: Path) -> None:
    full_plan().save(tmp_path / "plan.yaml")
    text = (tmp_path / "plan.yaml").read_text()
    assert text.startswith("#") and 'autockpt.apply(model, "plan.yaml")' in text
    assert "  model.layers.0-3: save\n  model.layers.4-10: recompute\n  model.layers.11: offload\n" in text
    assert "peak_bytes: 440000000  # 420 MiB (440 MB)" in text
    assert max(map(len, text.splitlines())) <= 120


WITH_OPTIONS = [
    GATHERED,
    Recompute(gathered=True),
    parse_choice({"kind": "offload", "window": 2}),
    parse_choice({"kind": "remake", "keep": ["**", "x: y", "a, b]", "#", "'", "mlp.gate_proj" * 20]}),
]


@pytest.mark.slow
@given(st.lists(st.sampled_from([SAVE, RECOMPUTE, OFFLOAD, *WITH_OPTIONS]), min_size=12, max_size=12))
def test_any_assignment_round_trips(tmp_path_factory: pytest.TempPathFactory, values: list[Choice]) -> None:
    choices = dict(zip(BLOCKS, values, strict=True))
    path = tmp_path_factory.getbasetemp() / "any.yaml"
    full_plan(choices).save(path, replace=True)
    loaded = Plan.load(path)
    assert loaded.expand(BLOCKS) == choices and loaded.status == "measured"
    kept = sum(choice.gathered for choice in values)
    assert (f"{kept} gathered" in words.tally(choices)) == bool(kept)


def test_the_smallest_plan_is_written_by_hand(tmp_path: Path) -> None:
    plan = Plan.load(write(tmp_path, 'autockpt: 1\nchoices:\n  "**.layers.*": recompute\n'))
    assert plan.status == "unmeasured" and "by hand" in plan.status_reason
    assert plan.expand(u.name for u in UNITS) == dict.fromkeys(BLOCKS, RECOMPUTE)
    plan.check_structure(UNITS)


def test_an_edited_plan_is_unmeasured(tmp_path: Path) -> None:
    full_plan().save(tmp_path / "plan.yaml")
    text = (tmp_path / "plan.yaml").read_text()
    edited = Plan.load(write(tmp_path, text.replace("model.layers.11: offload", "model.layers.11: save")))
    assert edited.status == "unmeasured" and "edited" in edited.status_reason and edited.source == "measured"
    rewritten = Plan.load(write(tmp_path, text.replace("0-3: save", "0: save\n  model.layers.1-3: save")))
    assert rewritten.status == "measured"


def test_a_plan_cannot_claim_what_it_does_not_hold(tmp_path: Path) -> None:
    claimed = Plan.load(write(tmp_path, "autockpt: 1\nsource: measured\nchoices: {a: recompute}\n"))
    assert claimed.status == "unmeasured"
    never_run = Plan.create(CHOICES, UNITS, source="measured")
    assert never_run.status == "unmeasured" and "no measurement" in never_run.status_reason


@pytest.mark.parametrize(
    ("text", "line", "word"),
    [
        ("autockpt: 2\nchoices: {a: save}\n", 1, "newer"),
        ("autockpt: one\nchoices: {a: save}\n", 1, "autockpt"),
        ("autockpt: 1\nchoises:\n  a: save\n", 2, "unknown key 'choises'"),
        ("autockpt: 1\nchoices:\n", 2, "choices"),
        ("autockpt: 1\nchoices:\n  a: save\n  b: recompte\n", 4, "recompte"),
        ("autockpt: 1\nchoices:\n  a:\n", 3, "unknown choice"),
        ("autockpt: 1\nchoices:\n  a: {kind: save, speed: 3}\n", 3, "speed"),
        ("autockpt: 1\nchoices:\n  a*: save\n", 3, "a*"),
        ("autockpt: 1\nchoices:\n  a: save\n  a: recompute\n", 4, "line 3"),
        ("autockpt: 1\nbudget:\n  asked: x\n  bytes: -5\nchoices:\n  a: save\n", 4, "equal to 0"),
        ("autockpt: 1\nbudget:\n  asked: x\n  bytes: many\nchoices:\n  a: save\n", 4, "bytes"),
        ("autockpt: 1\nmodel:\n  units:\n    a.*: X\nchoices:\n  a: save\n", 4, "a.*"),
        ("autockpt: 1\nmodel:\n  units:\n    a: X\nchoices:\n  b: save\n", 6, "'b'"),
        ("autockpt: 1\nmodel:\n  units:\n    a.0-3: X\nchoices:\n  a.0-3: save\n  a.2: save\n", 7, "twice"),
        ("choices:\n  a: save\n", 1, "not a plan"),
        ("", 1, "not a plan"),
    ],
)
def test_bad_plans_are_errors_with_line_and_remedy(tmp_path: Path, text: str, line: int, word: str) -> None:
    with pytest.raises(PlanError) as caught:
        Plan.load(write(tmp_path, text))
    assert caught.value.message.startswith(f"{tmp_path}/plan.yaml:{line}: "), "of two plans one has to know which"
    assert word in caught.value.message and caught.value.remedy


@pytest.mark.parametrize("prefix", ["base_model.model.", "_orig_mod.", "module.", "module._orig_mod.", "model."])
def test_wrapped_models_are_seen_through(prefix: str) -> None:
    plan = full_plan()
    wrapped = [u.model_copy(update={"name": prefix + u.name}) for u in UNITS]
    assert plan.expand(u.name for u in wrapped) == {prefix + n: c for n, c in CHOICES.items()}
    plan.check_structure(wrapped)


def test_another_structure_is_refused() -> None:
    plan = full_plan()
    with pytest.raises(PlanError):
        plan.check_structure(u for u in UNITS if u.name.split(".")[2] not in ("8", "9", "10", "11"))
    with pytest.raises(PlanError):
        plan.check_structure([*UNITS, Unit(name="model.layers.12", cls="LlamaDecoderLayer", kind=0)])
    with pytest.raises(PlanError):
        plan.check_structure(u.model_copy(update={"cls": u.cls.replace("MLP", "MoE")}) for u in UNITS)


def test_an_existing_file_is_never_lost(tmp_path: Path) -> None:
    path = tmp_path / "sub" / "plan.yaml"
    first, second = full_plan(), full_plan(dict.fromkeys(BLOCKS, RECOMPUTE))
    assert first.save(path) is None
    assert first.save(path) is None, "the same plan again is no conflict"
    aside = second.save(path)
    assert (
        aside == tmp_path / "sub" / "plan.yaml.1" and aside and Plan.load(aside) == first and Plan.load(path) == second
    )
    assert first.save(path, replace=True) is None and Plan.load(path) == first
    path.write_text("something else entirely")
    aside = first.save(path)
    assert aside is not None and aside.name == "plan.yaml.2" and aside.read_text() == "something else entirely"


def test_the_hash_is_of_what_a_plan_does() -> None:
    assert plan_hash({}) == plan_hash({"a": SAVE})
    assert plan_hash({"a": SAVE, "b": RECOMPUTE}) == plan_hash({"b": RECOMPUTE})
    assert plan_hash({"a": RECOMPUTE}) != plan_hash({"b": RECOMPUTE}) != plan_hash({"b": OFFLOAD})
    assert plan_hash({"a": OFFLOAD, "b": RECOMPUTE}) == plan_hash({"b": RECOMPUTE, "a": OFFLOAD})


def test_a_set_without_a_workload_length_takes_its_own() -> None:
    small = Plan(choices={"a": SAVE}).model_copy(update={"when": When(tokens=64)})
    whole = Plan(
        choices={"a": RECOMPUTE},
        workload=WorkloadSpec(model="llama-tiny", batch_size=4),
        settings={"batch_size": 4, "seq_len": 64},
    )
    sets = whole.with_smaller([small]).sets
    assert [plan.workload.seq_len for plan in sets if plan.workload is not None] == [16, None]


def test_what_no_step_calls_is_no_other_structure() -> None:
    layer = Unit(name="h.0", cls="Block", kind=0)
    idle = [Unit(name=f"tower.{i}", cls="Block", kind=0) for i in (1, 10)]
    plan = Plan.create({"h.0": RECOMPUTE}, [layer], settings={NEVER_CALLED: "tower.1"})
    plan.check_structure([layer, idle[0]])
    with pytest.raises(PlanError):
        plan.check_structure([layer, *idle])


def test_the_output_head_is_known_in_a_wrapped_model() -> None:
    units = [Unit(name="h.0", cls="Block", kind=0), Unit(name="lm_head", cls="Linear", kind=1, role="head")]
    plan = Plan.create({"h.0": RECOMPUTE, "lm_head": CHUNKED_LOSS}, units)
    layer, head = (unit.model_copy(update={"name": f"module.{unit.name}"}) for unit in units)
    assert plan.head == "lm_head" and Plan(choices={"h.*": CHUNKED_LOSS}).head is None
    expected = {"module.h.0": RECOMPUTE, "module.lm_head": CHUNKED_LOSS}
    assert plan.choices_for([layer], head) == expected
    of_peft = {f"base_model.model.{name}": choice for name, choice in plan.choices.items()}
    assert Plan(choices=of_peft).choices_for([layer], head) == expected


@pytest.mark.parametrize(
    "choices",
    [
        {"lm_head": RECOMPUTE},
        {"h.0": CHUNKED_LOSS},
        {"h.*": CHUNKED_LOSS},
        {"lm_head": CHUNKED_LOSS, "model.lm_head": SAVE},
    ],
)
def test_choices_on_the_wrong_side_of_the_head_are_refused(choices: dict[str, Choice]) -> None:
    with pytest.raises(PlanError) as refused:
        Plan(choices=choices).expand(["h.0"], "lm_head")
    assert ("get_output_embeddings" in refused.value.remedy) == ("lm_head" not in choices)


def with_sets() -> Plan:
    short = full_plan({n: SAVE for n in BLOCKS}).model_copy(update={"when": When(tokens=512), "share": 0.75})
    middle = full_plan({n: RECOMPUTE if i < 3 else SAVE for i, n in enumerate(BLOCKS)})
    middle = middle.model_copy(update={"when": When(tokens=2048, longest=512), "share": 0.2})
    return full_plan().model_copy(update={"when": When(tokens=4096), "share": 0.05}).with_smaller([middle, short])


def test_sets_for_smaller_batches_survive_the_file(tmp_path: Path) -> None:
    plan = with_sets()
    plan.save(tmp_path / "plan.yaml")
    loaded = Plan.load(tmp_path / "plan.yaml")
    assert loaded == plan and loaded.status == "measured"
    short, middle, largest = loaded.sets
    bounds = ["512 tokens", "2,048 tokens, sequences up to 512", "4,096 tokens"]
    assert [str(each.when) for each in loaded.sets] == bounds
    assert all(choice == SAVE for choice in short.expand_planned().values())
    assert short.status == middle.status == "measured"
    assert middle.hash == plan_hash(middle.expand_planned()) and largest.choices == plan.choices
    assert short.measured == plan.measured and not short.baselines and largest.baselines
    lines = str(loaded).splitlines()
    assert "up to 512 tokens, 75.0 % of batches: ............" in lines[4]
    assert "up to 4,096 tokens, and larger" in lines[6]
    assert full_plan().sets == (full_plan(),)


def test_an_edited_set_makes_the_plan_unmeasured(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    with_sets().save(path)
    text = path.read_text()
    for old, new in (("tokens: 512", "tokens: 600"), ("model.layers.3-11: save", "model.layers.3-11: offload")):
        assert old in text
        path.write_text(text.replace(old, new, 1))
        assert Plan.load(path).status == "unmeasured"
        assert "for smaller batches" in Plan.load(path).status_reason


@pytest.mark.parametrize(
    "section",
    [
        "- when: {tokens: 8}\n  choices: {a: recompute}\n- when: {tokens: 8}\n  choices: {a: save}",
        "- when: {tokens: 8, longest: 8}\n  choices: {a: save}\n- when: {tokens: 16, longest: 4}\n  choices: {a: save}",
        "- when: {tokens: 8}\n  choices: {a: recomptue}",
        "- when: {tokens: 8}\n  choices: {}",
        "- when: {tokens: 0}\n  choices: {a: save}",
        "- when: {seconds: 1}\n  choices: {a: save}",
        "- choices: {a: save}",
    ],
)
def test_sets_that_are_none_are_refused_with_their_line(tmp_path: Path, section: str) -> None:
    with pytest.raises(PlanError):
        Plan.load(write(tmp_path, f"autockpt: 1\nchoices: {{a: save}}\nsmaller_batches:\n{section}\n"))


def test_a_plan_in_words_compares_it_with_the_usual_plans() -> None:
    rows = (row("none", "out_of_memory", 900, 1.0, None), row("recompute all", "fits", 400, 1.4, (405, 2.0)))
    plan = full_plan().model_copy(update={"baselines": rows})
    assert plan.measured is not None
    compared = words.compared(plan.measured, rows[1].measured, "recomputing everything")
    lines, line = str(plan).splitlines(), applied(plan, {"a.0": RECOMPUTE, "a.1": SAVE})
    assert len(lines) == 5 and plan.hash in lines[0] and compared in lines[3] and "\n" not in line
    assert f"plan {plan.hash}, measured: 1 recompute, 1 save; peak " in line
    assert compared in line and "saving everything runs out of memory" in line
    itself = rows[1].model_copy(update={"plan_hash": plan.hash})
    assert "recomputing" not in applied(plan.model_copy(update={"baselines": (itself,)}), CHOICES)
    by_hand = Plan(choices={"layers.0-3": RECOMPUTE})  # of how many layers is not known
    assert "peak unknown" in applied(by_hand, CHOICES) and "layers.0-3: recompute" in str(by_hand)


def test_every_kind_of_choice_in_a_file_has_one_comment() -> None:
    mixed = {"h.0": {"kind": "remake", "within": ["mlp"]}, "h.1": "offload"}
    smaller = {"when": {"tokens": 4096}, "choices": {"h.0": "save", "h.1": "recompute"}}
    text = Plan.model_validate({"choices": mixed, "smaller_batches": [smaller]}).text()
    comments = " ".join(text.replace("\n#   ", " ").split())
    for kind, cls in CHOICE_TYPES.items():
        assert comments.count(f"# {kind}: {cls.says()}") == (kind in ("save", "recompute", "remake", "offload")), kind
    assert "within: modules" in comments and "keep: modules" not in comments


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*/plans/*.yaml")), ids=lambda path: path.stem)
def test_plans_on_record_load(path: Path) -> None:
    assert Plan.load(path).choices
