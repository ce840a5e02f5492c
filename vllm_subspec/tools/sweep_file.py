"""A sweep's results: JSON lines, of which the first says what was measured, on what, by what."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_subspec.errors import ConfigError
from vllm_subspec.files import atomic_replace

Record = Mapping[str, Any]


@dataclass(frozen=True)
class Results:
    """The lines of one file; ``kind`` tells them apart.

    Attributes:
        path: of the file.
        header: its first line: ``identity`` (what must not change while it grows) and more.
        records: the other lines, oldest first.
    """

    path: Path
    header: Record
    records: list[Record]

    @classmethod
    def read(cls, path: Path) -> Results:
        """A file of which the last line may be torn.

        Raises:
            ConfigError: it is no such file.
        """
        try:
            whole, _, _ = path.read_text(encoding="utf-8").rpartition("\n")
            lines = [json.loads(line) for line in whole.split("\n")]
            if lines[0]["kind"] != "sweep":
                raise ValueError("its first line is of another kind")
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{path} is no result of a sweep: {error}") from error
        return cls(path, lines[0], lines[1:])

    @classmethod
    def begin_or_resume(cls, path: Path, header: Record) -> Results:
        """A new file with this header, or the one that is there if its identity is the same.

        Raises:
            ConfigError: it was measured on something else; what differs is named.
        """
        if not path.exists():
            with atomic_replace(path) as temporary:
                temporary.write_text(json.dumps(header) + "\n", encoding="utf-8")
            path.chmod(0o644)  # to be published
            return cls(path, header, [])
        found = cls.read(path)
        old, new = found.header["identity"], json.loads(json.dumps(header["identity"]))
        for name in {**old, **new}:
            if old.get(name) != new.get(name):
                raise ConfigError(
                    f"{path} was measured with {name} {old.get(name)!r}, this would be with "
                    f"{new.get(name)!r}: give another file, or remove that one"
                )
        with path.open("r+b") as file:  # without a torn line
            end = file.read().rfind(b"\n") + 1
            file.truncate(end)
        return found

    def refresh(self) -> None:
        """Take up what another process added."""
        self.records[:] = Results.read(self.path).records

    def of_kind(self, kind: str) -> list[Record]:
        """Records of one kind."""
        return [record for record in self.records if record["kind"] == kind]

    def append(self, records: Iterable[Record]) -> None:
        """Add lines, all or none as far as other processes see it; on disk when this returns."""
        added = list(records)
        lines = "".join(json.dumps(record, allow_nan=False) + "\n" for record in added)
        handle = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        try:
            os.write(handle, lines.encode())
            os.fsync(handle)
        finally:
            os.close(handle)
        self.records.extend(added)


def matching(records: Sequence[Record], **wanted: Any) -> list[Record]:
    """Records that have these values."""
    return [r for r in records if all(r[name] == value for name, value in wanted.items())]
