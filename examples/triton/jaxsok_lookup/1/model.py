"""Serves a model of an HPS configuration from Triton's Python back end: embeddings, and predictions if it has any.

The inputs and outputs are those of config.pbtxt, two folders above this file.
"""

import json

import numpy as np
import triton_python_backend_utils as pb_utils

from jaxsok import serving

ENDING = "_embeddings"  # of the outputs that are rows of a table


class TritonPythonModel:
    """What the Python back end loads."""

    def initialize(self, args):
        """Opens the session; an error here stops Triton from loading the model, with the message in its log."""
        config = json.loads(args["model_config"])
        parameters = {name: value["string_value"] for name, value in config.get("parameters", {}).items()}
        self.inputs = [entry["name"] for entry in config["input"]]
        self.outputs = [entry["name"] for entry in config["output"]]
        if "config" not in parameters:
            raise ValueError("jaxsok_lookup: config.pbtxt: parameters: got no config, wanted the path of one of HPS.")
        self.session = serving.open(parameters["config"])
        self.model = parameters.get("model") or next(iter(self.session.models))
        if self.model not in self.session.models:
            raise ValueError(
                f"jaxsok_lookup: config.pbtxt: parameters: model: got {self.model!r}, wanted one of "
                f"{list(self.session.models)}, those of {parameters['config']}."
            )
        model = self.session.models[self.model]
        tables = [name.removesuffix(ENDING) for name in self.outputs if name.endswith(ENDING)]
        predictions = [name for name in self.outputs if not name.endswith(ENDING)]
        for name, known in (
            *((table, model.tables) for table in tables),
            *((table, self.inputs) for table in tables),
            *((name, model.outputs or {}) for name in predictions),
            *((name, self.inputs) for name in model.inputs or {} if predictions),
        ):
            if name not in known:
                raise ValueError(
                    f"jaxsok_lookup: config.pbtxt: got {name!r}, wanted one of {list(known)}: outputs are "
                    f"TABLE{ENDING} of a table whose keys are the input TABLE, or results of the dense model."
                )
        if config.get("max_batch_size", 0) > model.max_batch_size:
            raise ValueError(
                f"jaxsok_lookup: config.pbtxt: max_batch_size: got {config['max_batch_size']}, wanted at most "
                f"{model.max_batch_size}, that of model {self.model!r} in {parameters['config']}."
            )

    def execute(self, requests):
        """Answers each request; one that is wrong gets an error, and the others their answers."""
        return [self._answer(request) for request in requests]

    def finalize(self):
        """Ends the session's threads."""
        self.session.close()

    def _answer(self, request):
        try:
            # The back end gives the names that the client wants; older ones give none for "all".
            wanted = [name for name in self.outputs if name in (request.requested_output_names() or self.outputs)]
            tensors = {name: pb_utils.get_input_tensor_by_name(request, name) for name in self.inputs}
            given = {name: tensor.as_numpy() for name, tensor in tensors.items() if tensor is not None}
            tables = [name.removesuffix(ENDING) for name in wanted if name.endswith(ENDING)]
            needed = list(self.session.models[self.model].inputs) if len(tables) < len(wanted) else []
            if missing := [name for name in dict.fromkeys([*tables, *needed]) if name not in given]:
                raise ValueError(f"jaxsok_lookup: inputs: got {list(given)}, wanted {missing} too.")
            rows = predicted = None
            while rows is None or (tables and needed and rows.version != predicted.version):  # an update came between
                rows = self.session.lookup({table: given[table] for table in tables}, self.model) if tables else {}
                predicted = self.session.predict({name: given[name] for name in needed}, self.model) if needed else {}
            found = {**{table + ENDING: rows[table] for table in tables}, **predicted}
            return pb_utils.InferenceResponse(
                [pb_utils.Tensor(name, np.ascontiguousarray(found[name])) for name in wanted]
            )
        except ValueError as error:  # ServingError is one; anything else is a fault, and Triton reports it
            return pb_utils.InferenceResponse(output_tensors=[], error=pb_utils.TritonError(str(error)))
