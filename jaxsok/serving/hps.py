"""HPS's layers by HPS's own arguments: Flax NNX layers whose tables come from an HPS configuration.

For programs that come from HPS: `from jaxsok.serving import hps`. Each layer is one of `jaxsok.serving.nnx`, which
explains calls, and takes part in its `set_tables` and in `export_model`.
"""

import dataclasses
import os
from typing import Any

import numpy as np
from jaxtyping import Array, Float32

from jaxsok import adapters, checks
from jaxsok.adapters import Coo
from jaxsok.features import Bags
from jaxsok.serving import nnx
from jaxsok.serving.config import read
from jaxsok.serving.model.served import choose_model, load_tables
from jaxsok.specs import FeatureSpec

__all__ = ["LookupLayer", "LookupLayers", "SparseLookupLayer"]


class _OfOneTable:
    """Takes HPS's arguments for the layer of `jaxsok.serving.nnx` that follows in the order of classes."""

    def __init__(
        self,
        model_name: str,
        table_id: int,
        emb_vec_size: int,
        emb_vec_dtype: Any = np.float32,
        ps_config_file: str | os.PathLike[str] = "",
        global_batch_size: int = 1,
    ):
        del global_batch_size
        op = type(self).__name__
        tables = choose_model(op, read(ps_config_file), model_name).tables
        table = tables[checks.integer(f"{op}: table_id", table_id, 0, len(tables) - 1)]
        dtype = getattr(emb_vec_dtype, "name", None) or np.dtype(emb_vec_dtype).name
        if dtype != "float32":
            raise ValueError(f"{op}: emb_vec_dtype: got {dtype}, wanted float32, as HPS has it.")
        if emb_vec_size != table.dim:
            raise ValueError(
                f'{op}: emb_vec_size: got {emb_vec_size}, wanted {table.dim}, as "{ps_config_file}" has for table '
                f'"{table.name}".'
            )
        loaded = load_tables(ps_config_file, model_name, tables=[table.name])
        super().__init__(table.name, dim=table.dim, tables=loaded)  # pyright: ignore[reportCallIssue]


class LookupLayer(_OfOneTable, nnx.LookupLayer):
    """A row for each key of one table of an HPS model: `jaxsok.serving.nnx.LookupLayer` with HPS's arguments.

    Each layer loads its own table and makes a call of its own; `LookupLayers` makes one call for all tables.

    Args:
      model_name: of the configuration.
      table_id: the place of the table in the model's lists.
      emb_vec_size, emb_vec_dtype: the dim of the table, and float32, of NumPy, JAX or TensorFlow; compared.
      ps_config_file: the path of the configuration.
      global_batch_size: has no effect; calls may have any size.

    Raises:
      ConfigError, UnknownModelError, ValueError: the configuration, or arguments that do not fit it.
      FileNotFoundError, ServingError: files of the table.

    Example:
      `rows = LookupLayer("8_table", 0, 128, np.float32, "8_table.json")(keys)`

    Source: HPS's `hps.LookupLayer` for TensorFlow.
    """


def _with_weights(ids: Any, weights: Any) -> Any:
    """Gives keys the weights that lie in a structure like theirs."""
    if not isinstance(ids, (Bags, Coo)):
        return Bags(ids, weights=weights)  # also of two `tf.SparseTensor`s
    if isinstance(weights, type(ids)):
        for name in {field.name for field in dataclasses.fields(ids)} - {"keys", "weights"}:
            mine, other = getattr(ids, name), getattr(weights, name)
            if (mine is None) != (other is None) or not np.array_equal(mine, other):
                raise ValueError(f"SparseLookupLayer: sp_weights: {name}: got {other}, wanted those of sp_ids, {mine}.")
        weights = weights.keys
    return dataclasses.replace(ids, weights=weights)


class SparseLookupLayer(_OfOneTable, nnx.SparseLookupLayer):
    """An embedding for each bag of one table of an HPS model: `nnx.SparseLookupLayer` with HPS's arguments.

    The arguments and errors are those of `LookupLayer`. A call takes `sp_ids` in any form that `Collection.batch` takes
    (a `tf.SparseTensor`, `jaxsok.Coo`, `jaxsok.Bags`), and `sp_weights` of the same structure.

    Example:
      `embeddings = SparseLookupLayer("dlrm", 1, 16, np.float32, "ps.json")(sp_ids, combiner="sum")`

    Source: HPS's `hps.SparseLookupLayer` for TensorFlow.
    """

    def __call__(self, sp_ids: Any, sp_weights: Any = None, **options: Any) -> Float32[Array, "num_bags dim"]:
        """Looks up; `options` are those of `jaxsok.serving.nnx.SparseLookupLayer`."""
        ids = sp_ids if sp_weights is None else _with_weights(sp_ids, sp_weights)
        spec = FeatureSpec("sp_ids", table=self.spec.table, weighted=sp_weights is not None)
        return super().__call__(
            adapters.convert_features({"sp_ids": ids}, [spec], type(self).__name__)["sp_ids"], **options
        )


class LookupLayers(nnx.LookupLayers):
    """All tables of an HPS model in one layer: `jaxsok.serving.nnx.LookupLayers`, with an input for each table's name.

    Args:
      model_name: of the configuration.
      ps_config_file: its path.

    Raises:
      ConfigError, UnknownModelError, FileNotFoundError, ServingError: as `LookupLayer`.

    Example:
      `embeddings = LookupLayers("8_table", "8_table.json")({"table0": keys, "table1": others})`
    """

    def __init__(self, model_name: str, ps_config_file: str | os.PathLike[str]):
        model = choose_model("LookupLayers", read(ps_config_file), model_name)
        specs = {table.name: nnx.LookupSpec(table.name, dim=table.dim) for table in model.tables}
        super().__init__(specs, tables=load_tables(ps_config_file, model_name))
