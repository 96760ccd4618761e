"""Tables in files of other systems, in and out: records to bytes and back, a chunk at a time.

hps.py has the pair of HugeCTR's parameter server, sok.py the dump of SparseOperationKit, columns.py Parquet, npz.py
NumPy's own; torchrec.py loads TorchRec's checkpoints. Users import each by name.

Each module writes and reads `Records` of one table, which needs no collection. `write_…` takes `records`, one chunk or
an iterable of them, and `overwrite`: whether files that are there may go; it returns the number of rows. `read_…`
checks the files, all keys included, before it returns a `RecordChunks`; `chunk_rows` is the number of rows at once,
None about 64 MiB. Writers raise FileExistsError, readers FileNotFoundError, and ValueError for what is truncated,
broken or of another format, for PADDING_KEY, and for a key that occurs twice; messages name the file and the byte.

Each module has `save` and `load` on a collection as well, but torchrec.py, which has `load` alone, and npz.py, whose
files are saved and loaded by columns.py:

| argument | |
|---|---|
| `collection` | `save`: of one process; `load`: on any mesh |
| `state` | `save`: not donated; `load`: donated, and the result has what there was and the rows of the files |
| `directory` | where the files are; `save` makes it |
| `tables` | names, or a mapping from them to those in files, where punctuation becomes `_`; None: all |
| `format` | of columns.py: "parquet" or "npz" |
| `with_state` | whether to write, or take, optimizer state; else that of new rows is initial |
| `reset_state` | whether state of rows that are there becomes initial where the files have none |
| `overwrite`, `chunk_rows` | as above |

`save` returns the number of rows by table. It raises ValueError for a table that is not there, or two for one file.
`load` checks all files before it enters the first row; a key that has a row already gets that of the file. It raises
what the reader raises, and ValueError where a file does not fit its table; the state is then as it was. Where tables
cannot grow as far it raises MemoryError or TableFullError, whose `state` is the state as it is then.
"""
