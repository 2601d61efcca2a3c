from collections.abc import Mapping
from os import PathLike
from typing import IO

from pyarrow import DataType, Table

class ConvertOptions:
    def __init__(
        self, *, strings_can_be_null: bool = False, column_types: Mapping[str, DataType] | None = None
    ) -> None: ...

def read_csv(
    input_file: str | PathLike[str] | IO[bytes], *, convert_options: ConvertOptions | None = None
) -> Table: ...
