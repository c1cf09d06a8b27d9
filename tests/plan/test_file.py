"""A plan survives its file exactly, and a broken file is answered with the place and the fix."""

import copy
import dataclasses
import json
import os
import re
import stat

import pytest
from plan.sample import NUM_LAYERS, one_device_plan, sample_plan

from autoplan.errors import PlanError
from autoplan.plan.file import load_plan, plan_from_json, plan_json, plan_to_json, save_plan
from autoplan.plan.plan import ParamPlacement, Plan
from autoplan.sharding import REPLICATE, Shard


def with_one_layer_apart() -> Plan:
    plan = sample_plan()
    params = tuple(
        dataclasses.replace(p, tensor=REPLICATE) if p.name == "h.3.mlp.c_fc.weight" else p for p in plan.params
    )
    return dataclasses.replace(plan, params=params)


def with_odd_names() -> Plan:
    """Names that folding could trip over: gaps, leading zeros, a literal star, nested numbers, no numbers."""
    names = ("a.00.w", "a.1.w", "a.2.w", "a.4.w", "a.*", "a.5", "e.0.x.0.w", "e.0.x.1.w", "e.1.x.0.w", "e.1.x.1.w", "7")
    plan = one_device_plan()
    return dataclasses.replace(
        plan,
        params=tuple(ParamPlacement(name=name, tensor=Shard(0) if name == "a.5" else REPLICATE) for name in names),
        segment_params=(names[:3], *((name,) for name in names[3:9]), names[9:]),
        assumptions=(("note", "first"), ("note", "second, named alike")),
    )


@pytest.mark.parametrize("make", [sample_plan, one_device_plan, with_one_layer_apart, with_odd_names])
def test_round_trip_is_exact(make, tmp_path):
    plan, path = make(), str(tmp_path / "plan.json")
    plan.save(path)
    assert Plan.load(path) == plan
    assert plan_json(Plan.load(path)) == plan_json(plan)


def test_parameters_are_folded_over_layers():
    data = plan_to_json(sample_plan())
    assert data["parameters"]["h.*.attn.c_attn.weight"] == {"tp": "Shard(0, blocks=3)", "dp": "Shard(1)"}
    assert not any(name.startswith("h.0") for name in data["parameters"])
    assert [entry.get("layers") for entry in data["segments"]] == [None, [0, NUM_LAYERS - 1], None]


def test_a_pattern_that_members_disagree_on_is_written_out():
    parameters = plan_to_json(with_one_layer_apart())["parameters"]
    assert "h.*.mlp.c_fc.weight" not in parameters
    assert parameters["h.3.mlp.c_fc.weight"]["tp"] == "Replicate"


def test_a_single_name_wins_over_a_pattern():
    data = json.loads(plan_json(sample_plan()))
    data["parameters"]["h.3.mlp.c_fc.weight"] = {"tp": "Replicate", "dp": "Shard(1)"}
    assert plan_from_json(data) == with_one_layer_apart()


def test_two_patterns_for_one_name_are_refused():
    data = json.loads(plan_json(with_odd_names()))
    replicate = {"tp": "Replicate", "dp": "Replicate"}
    del data["parameters"]["e.*.x.*.w"]
    data["parameters"] |= {"e.*.x.0.w": replicate, "e.0.x.*.w": replicate}
    with pytest.raises(PlanError, match=r"'e.0.x.0.w' also belongs to another pattern"):
        plan_from_json(data)


def test_lines_stay_readable():
    assert max(map(len, plan_json(sample_plan()).splitlines())) <= 120


def remove(*keys):
    def change(data):
        for key in keys[:-1]:
            data = data[key]
        del data[keys[-1]]

    return change


def put(value, *keys):
    def change(data):
        for key in keys[:-1]:
            data = data[key]
        data[keys[-1]] = value

    return change


def both(*changes):
    def change(data):
        for each in changes:
            each(data)

    return change


CORRUPTIONS = {
    "unknown key": (put(1, "shedule"), "unknown key 'shedule'; did you mean 'schedule'?"),
    "unknown key inside": (put(1, "stages", 1, "begin"), "stages[1]: unknown key 'begin'"),
    "missing key": (remove("mesh"), "missing key 'mesh'"),
    "missing key inside": (remove("layouts", 2, "cost", "forward_us"), "layouts[2].cost: missing key 'forward_us'"),
    "missing schema": (remove("schema_version"), "'schema_version' is missing"),
    "other schema": (put(1, "schema_version"), "schema_version: this plan has schema version 1, this autoplan reads"),
    "text for a number": (put("64", "batch_size"), "batch_size: expected a whole number, found text"),
    "float for a whole": (put(64.0, "batch_size"), "batch_size: expected a whole number, found a number (64.0)"),
    "bool for a whole": (put(True, "num_microbatches"), "num_microbatches: expected a whole number, found true"),
    "null": (put(None, "model"), "model: expected text, found null"),
    "list for an object": (put([], "cluster"), "cluster: expected an object, found a list"),
    "object for a list": (put({}, "stages"), "stages: expected a list, found an object"),
    "negative": (put(-1.0, "stages", 0, "forward_us"), "stages[0].forward_us: expected a number from 0"),
    "huge": (put(10**200, "step_us", "compute"), "step_us.compute: expected a number from 0"),
    "bad placement": (put("Shard(x)", "inputs", "input:0"), "inputs[\"input:0\"]: 'Shard(x)' is not a placement"),
    "bad strategy": (put("Shard(0)", "layouts", 1, "ops", 0, "batch"), "layouts[1].ops[0].batch: 'Shard(0)' is not a"),
    "half a strategy": (
        put("Shard(0)!! -> Shard(0)", "layouts", 1, "ops", 3, "tensor"),
        "layouts[1].ops[3].tensor: 'Shard(0)!! -> Shard(0)' is not a strategy",
    ),
    "unknown word": (put("zero3", "data"), "data: expected one of replicate, zero1, zero2, shard, found 'zero3'"),
    "unknown kind": (put("blok", "layouts", 1, "kind"), "layouts[1].kind: expected one of embed, block, head"),
    "unknown collective": (put("gather", "stages", 0, "collectives", 0, "kind"), "stages[0].collectives[0].kind"),
    "unknown axis": (put("xp", "stages", 0, "collectives", 0, "axis"), "stages[0].collectives[0].axis: expected one"),
    "unknown layout": (
        put("blocc", "stages", 1, "layouts", 1),
        "stages[1].layouts[1]: there is no layout 'blocc'; segment 6 is of kind 'block'; layouts of that kind: block,",
    ),
    "layout of another kind": (put("head", "stages", 0, "layouts", 3), "stages[0].layouts[3]: layout 'head' is for"),
    "too few layouts": (remove("stages", 0, "layouts", 0), "stages[0].layouts: expected one for each of the 5"),
    "gap in the chain": (put(6, "stages", 1, "start"), "stages[1].start: expected 5, found 6"),
    "chain too long": (put(9, "stages", 1, "end"), "stages[1].end: expected 8, found 9"),
    "empty stage": (put(0, "stages", 0, "end"), "stages[0].end: expected more than 0"),
    "stage missing": (remove("stages", 1), "stages: expected 2 stages"),
    "mesh too large": (put(4, "mesh", "dp"), "mesh: pp 2 x dp 4 x cp 1 x tp 2 = 16 devices, but the cluster"),
    "no devices": (put(0, "mesh", "dp"), "mesh.dp: expected a whole number from 1"),
    "batch does not divide": (put(3, "num_microbatches"), "num_microbatches: the global batch of 64 does not divide"),
    "pattern without members": (
        put({"tp": "Replicate", "dp": "Replicate"}, "parameters", "h.*.atn.c_attn.weight"),
        'parameters["h.*.atn.c_attn.weight"]: matches no parameter of the model; did you mean',
    ),
    "star for a word": (
        put({"tp": "Replicate", "dp": "Replicate"}, "parameters", "*.*.mlp.c_fc.weight"),
        "matches no parameter of the model",
    ),
    "parameter left out": (remove("parameters", "wte.weight"), "parameters: no placement for 'wte.weight'"),
    "partial parameter": (
        put("Partial", "parameters", "wte.weight", "tp"),
        'parameters["wte.weight"].tp: a parameter cannot be Partial',
    ),
    "one dim split twice": (
        put("Shard(0)", "parameters", "wte.weight", "dp"),
        'parameters["wte.weight"].dp: tp splits dim 0 already',
    ),
    "shards in replicate mode": (put("replicate", "data"), 'shards: mode "replicate" splits nothing: expected 1'),
    "sharded in replicate mode": (both(put("replicate", "data"), put(1, "shards")), "go with data 'replicate'"),
    "name twice": (put("wte.weight", "parameter_names", 1), "parameter_names: 'wte.weight' is listed twice"),
    "layers backwards": (put([5, 0], "segments", 1, "layers"), "segments[1].layers: expected the first and the last"),
    "layers without end": (put([0, 10**9], "parameter_names", 2, "layers"), "parameter_names[2].layers: 1000000001"),
    "segment reads a stranger": (put(["x"], "segments", 0, "parameters"), "segments: segment 0 reads 'x'"),
    "layouts of one name": (put("block", "layouts", 2, "name"), "layouts: 'block' stands there twice"),
    "layouts that differ in ops": (remove("layouts", 2, "ops", 0), "layouts[2].ops: other ops than 'block' has"),
    "layouts that differ in values": (put([], "layouts", 2, "inputs"), "layouts[2].inputs: 0 placements, but 'block'"),
    "assumption of three": (put(["a", "b", "c"], "assumptions", 0), "assumptions[0]: expected a name and a text"),
    "half a character": (put("\ud800", "model"), "model: holds half of a UTF-16 pair"),
    "not an object": (None, "expected an object, found a list"),
}


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_a_corrupt_plan_names_the_place(name, tmp_path):
    change, message = CORRUPTIONS[name]
    data = json.loads(plan_json(sample_plan()))
    if change is None:
        data = [data]
    else:
        change(data)
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(data))
    with pytest.raises(PlanError, match=re.escape(message)) as caught:
        load_plan(str(path))
    assert str(caught.value).startswith(f"{path}: ")


@pytest.mark.parametrize(
    ("written", "message"),
    [
        (b"", "line 1 column 1: broken JSON"),
        (b'{\n  "schema_version": 1,\n  "model" "x"\n}', "line 3 column 11: broken JSON: Expecting ':' delimiter"),
        (b'{"schema_version": 1, "schema_version": 1}', "'schema_version' stands twice"),
        (b'{"schema_version": NaN}', "NaN is not a number that a plan may hold"),
        (b"\xff\xfe{}", "byte 0 is not UTF-8 text"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"schema_version": ' + b"1" * 5000 + b"}", "not a plan"),
        (b"null", "expected an object, found null"),
    ],
)
def test_what_is_not_json_is_answered(written, message, tmp_path):
    path = tmp_path / "plan.json"
    path.write_bytes(written)
    with pytest.raises(PlanError, match=re.escape(message)):
        load_plan(str(path))


def test_every_key_is_needed():
    whole = plan_to_json(sample_plan())
    for key in whole:
        data = copy.copy(whole)
        del data[key]
        with pytest.raises(PlanError, match=key):
            plan_from_json(data)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(PlanError, match=r"cannot read the plan .*gone.json: No such file"):
        load_plan(str(tmp_path / "gone.json"))


def test_a_failed_write_keeps_the_older_file(tmp_path, monkeypatch):
    path = tmp_path / "plan.json"
    path.write_text("older")

    def full_disk(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(OSError, match="No space left") as caught:
        save_plan(sample_plan(), str(path))
    assert caught.value.filename == str(path)
    assert os.listdir(tmp_path) == ["plan.json"]
    assert path.read_text() == "older"


def test_an_interrupted_write_leaves_nothing(tmp_path, monkeypatch):
    def interrupt(descriptor):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        save_plan(sample_plan(), str(tmp_path / "plan.json"))
    assert os.listdir(tmp_path) == []


def test_a_link_stays_a_link_and_a_device_a_device(tmp_path):
    (tmp_path / "link.json").symlink_to(tmp_path / "real.json")
    save_plan(sample_plan(), str(tmp_path / "link.json"))
    assert (tmp_path / "link.json").is_symlink()
    assert load_plan(str(tmp_path / "real.json")) == sample_plan()
    save_plan(sample_plan(), os.devnull)
    assert stat.S_ISCHR(os.stat(os.devnull).st_mode)


def test_a_missing_folder_is_named_without_the_temporary_file(tmp_path):
    with pytest.raises(FileNotFoundError) as caught:
        save_plan(sample_plan(), str(tmp_path / "none" / "plan.json"))
    assert caught.value.filename == str(tmp_path / "none" / "plan.json")
