"""The model folder for Triton, with a stand-in for the module that its Python back end brings."""

import dataclasses
import importlib.util
import json
import pathlib
import re
import sys
import types

import numpy as np
import pytest
from serving_cases import PLATFORMS, config_of, expect, model_of, rows_of, write

from jaxsok import serving
from jaxsok.serving.artifact import KeysInput, export_model
from jaxsok.serving.frozen import FrozenTable, SizedRecords, freeze_records
from jaxsok.serving.fused import lookup

FOLDER = pathlib.Path(__file__).resolve().parents[2] / "examples" / "triton" / "jaxsok_lookup"


# Triton --------------------------------------------------------------------------------------------------------------


def from_text_proto(text):
    """Parses a message as text into Triton's `initialize` arguments: fields, repeated ones as lists, maps as dicts."""
    tokens = re.findall(r'"[^"]*"|[\w.-]+|[\[\]{}:,]', re.sub(r"#.*", "", text))

    def value():
        token = tokens.pop(0)
        if token == "{":
            return message("}")
        if token == "[":
            items = []
            while tokens[0] != "]":
                items.append(value())
                assert tokens[0] in (",", "]")
                if tokens[0] == ",":
                    tokens.pop(0)
            tokens.pop(0)
            return items
        return token.strip('"') if not re.fullmatch(r"-?\d+", token) else int(token)

    def message(end):
        fields = {}
        while tokens and tokens[0] != end:
            name = tokens.pop(0)
            assert re.fullmatch(r"[a-z_]+", name)
            if tokens[0] == ":":
                tokens.pop(0)
            found = value()
            if name == "parameters":
                fields.setdefault(name, {})[found["key"]] = found["value"]
            else:
                assert name not in fields
                fields[name] = found
            if tokens and tokens[0] == ",":
                tokens.pop(0)
        assert not end or tokens.pop(0) == end
        return fields

    return message("")


@dataclasses.dataclass
class Tensor:
    """A stand-in for pb_utils.Tensor."""

    name: str
    array: np.ndarray

    def as_numpy(self):
        return self.array


@dataclasses.dataclass
class Response:
    """A stand-in for pb_utils.InferenceResponse."""

    output_tensors: list
    error: object = None

    def arrays(self):
        assert self.error is None, self.error
        return {tensor.name: tensor.array for tensor in self.output_tensors}


@dataclasses.dataclass
class Request:
    """A stand-in for pb_utils.InferenceRequest."""

    tensors: dict
    wanted: list

    def requested_output_names(self):
        return self.wanted


@pytest.fixture
def model_class(monkeypatch):
    """Returns the class of model.py, loaded as the back end loads it."""
    module = types.ModuleType("triton_python_backend_utils")
    module.Tensor, module.InferenceResponse, module.TritonError = Tensor, Response, str
    module.get_input_tensor_by_name = lambda request, name: (
        Tensor(name, request.tensors[name]) if name in request.tensors else None
    )
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", module)
    spec = importlib.util.spec_from_file_location("triton_model", FOLDER / "1" / "model.py")
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded.TritonPythonModel


# Tests ---------------------------------------------------------------------------------------------------------------

DIMS = {"user": 16, "item": 8}
CONTENT = {table: rows_of(range(40), dim) for table, dim in DIMS.items()}


def write_arguments(tmp_path, config, **changes):
    """Returns the arguments of `initialize`, for the HPS configuration and a changed config.pbtxt."""
    (tmp_path / "hps.json").write_text(json.dumps(config))
    model_config = from_text_proto((FOLDER / "config.pbtxt").read_text()) | changes
    model_config["parameters"] = {"config": {"string_value": str(tmp_path / "hps.json")}}
    return {"model_config": json.dumps(model_config), "model_name": "jaxsok_lookup"}


def hps_of(tmp_path, **more):
    tables = {table: (write(tmp_path / table, content), DIMS[table]) for table, content in CONTENT.items()}
    return config_of(model_of(tables, defaults={"user": -1.0}, max_batch_size=64, **more))


def test_the_configuration_is_whole():
    """The parts of config.pbtxt that Triton reads fit the folder and the model."""
    config = from_text_proto((FOLDER / "config.pbtxt").read_text())
    assert config["name"] == FOLDER.name and config["backend"] == "python"
    assert config["parameters"]["config"]["string_value"].endswith(".json")
    for entry, (table, dim) in zip(config["output"], DIMS.items(), strict=True):
        (keys,) = (entry["dims"] for entry in config["input"] if entry["name"] == table)
        assert (entry["name"], entry["dims"]) == (f"{table}_embeddings", [*keys, dim])


def test_requests_get_rows(model_class, tmp_path):
    """Several requests of different sizes in one call get their rows, and only a wrong request gets an error."""
    model = model_class()
    model.initialize(write_arguments(tmp_path, hps_of(tmp_path)))
    rng, requests = np.random.default_rng(0), []
    for samples in (1, 5, 64):
        keys = {table: rng.integers(-1, 50, (samples, n)) for table, n in (("user", 1), ("item", 4))}
        requests.append(Request(keys, ["user_embeddings", "item_embeddings"]))
    requests.append(Request(requests[0].tensors, ["item_embeddings"]))
    wrong = {table: keys.astype(np.float32) for table, keys in requests[0].tensors.items()}
    users = {"user": requests[0].tensors["user"]}
    requests.append(Request(users, ["user_embeddings"]))
    *answers, refused, short = model.execute(
        [*requests, Request(wrong, ["user_embeddings"]), Request(users, ["item_embeddings"])]
    )
    for request, answer in zip(requests, answers, strict=True):
        arrays = answer.arrays()
        assert list(arrays) == request.wanted
        for name, rows in arrays.items():
            table = name.removesuffix("_embeddings")
            default = {"user": -1.0}.get(table, 0.0)
            wanted = expect(CONTENT[table], request.tensors[table], default, DIMS[table])
            np.testing.assert_array_equal(rows, wanted)
            assert rows.dtype == np.float32
    assert "keys must be integers" in refused.error and refused.output_tensors == []
    assert "got ['user'], wanted ['item'] too" in short.error
    assert (requests[2].tensors["item"] == -1).any()
    model.finalize()


def test_predictions_come_along(model_class, tmp_path):
    """A request can ask for an output of the dense model and for rows."""
    table = FrozenTable("user", DIMS["user"])
    tables, _ = freeze_records([(table, SizedRecords(0, []))])

    def dense(tables, inputs):
        return {"score": lookup(tables, {"user": inputs["user"]})["user"].sum(axis=(1, 2))}

    export_model(tmp_path / "dense", dense, tables, {"user": KeysInput("user", shape=(1,))}, platforms=PLATFORMS)
    outputs = [{"name": "score"}, {"name": "item_embeddings"}]
    model = model_class()
    model.initialize(write_arguments(tmp_path, hps_of(tmp_path, dense_file=str(tmp_path / "dense")), output=outputs))
    keys = {"user": np.array([[3], [4]]), "item": np.array([[3, 4, 5, 6]] * 2)}
    (answer,) = model.execute([Request(keys, ["score", "item_embeddings"])])
    rows = expect(CONTENT["user"], keys["user"], -1.0, DIMS["user"])
    np.testing.assert_allclose(answer.arrays()["score"], rows.sum(axis=(1, 2)), rtol=1e-6)  # The order of sums differs.
    assert answer.arrays()["item_embeddings"].shape == (2, 4, DIMS["item"])
    model.finalize()


def test_rows_and_predictions_are_of_one_version(model_class, tmp_path):
    """An update that comes between the two lookups has both done again."""
    tables, _ = freeze_records([(FrozenTable("user", DIMS["user"]), SizedRecords(0, []))])

    def dense(tables, inputs):
        return {"first": lookup(tables, {"user": inputs["user"]})["user"][:, 0, 0]}

    export_model(tmp_path / "dense", dense, tables, {"user": KeysInput("user", shape=(1,))}, platforms=PLATFORMS)
    outputs = [{"name": "first"}, {"name": "user_embeddings"}]
    model = model_class()
    model.initialize(write_arguments(tmp_path, hps_of(tmp_path, dense_file=str(tmp_path / "dense")), output=outputs))
    newer, look_up, num_lookups = (
        write(tmp_path / "newer", rows_of(range(40), DIMS["user"], version=1)),
        model.session.lookup,
        0,
    )

    def update_after(keys, name):
        nonlocal num_lookups
        answer = look_up(keys, name)
        num_lookups += 1
        if num_lookups == 1:
            model.session.update({"user": newer})
        return answer

    model.session.lookup = update_after
    (answer,) = model.execute([Request({"user": np.array([[3], [4]])}, ["first", "user_embeddings"])])
    found = answer.arrays()
    assert num_lookups == 2
    np.testing.assert_array_equal(found["first"], [1021, 1028])
    np.testing.assert_array_equal(found["user_embeddings"][:, 0, 0], [1021, 1028])
    model.finalize()


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"output": [{"name": "usr_embeddings"}]}, "got 'usr', wanted one of"),
        ({"output": [{"name": "score"}]}, "got 'score', wanted one of"),
        ({"input": [{"name": "item"}]}, "got 'user', wanted one of"),
        ({"max_batch_size": 65}, "max_batch_size: got 65, wanted at most 64"),
    ],
)
def test_configurations_that_do_not_fit(changes, text, model_class, tmp_path):
    """A configuration that does not fit makes Triton refuse the model with a reason."""
    with pytest.raises(ValueError, match=re.escape(text)):
        model_class().initialize(write_arguments(tmp_path, hps_of(tmp_path), **changes))
    arguments = write_arguments(tmp_path, hps_of(tmp_path))
    config = json.loads(arguments["model_config"])
    for parameters, text in (({}, "got no config"), ({"model": "no"}, "model: got 'no', wanted one of ['")):
        given = {name: {"string_value": value} for name, value in parameters.items()}
        given |= {"config": config["parameters"]["config"]} if parameters else {}
        changed = {"model_config": json.dumps(config | {"parameters": given})}
        with pytest.raises(ValueError, match=re.escape(text)):
            model_class().initialize(changed)
    with pytest.raises(serving.ConfigError):
        model_class().initialize(write_arguments(tmp_path, {"models": []}))
