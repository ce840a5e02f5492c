"""Records to JSON and to markdown tables. A dry run's figures are struck out here, all at once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Row = dict[str, Any]
"""A record: column, with its unit, to a string, a count (int) or a figure (float)."""
Rows = list[Row]
Tables = dict[str, Rows]
"""Title to records."""


def without_figures(tables: Tables) -> Tables:
    """The same with every float None: in a dry run no number may pass for a measurement."""
    return {
        title: [
            {column: None if isinstance(value, float) else value for column, value in row.items()}
            for row in rows
        ]
        for title, rows in tables.items()
    }


def markdown(sections: Mapping[str, Tables], is_dry: bool) -> str:
    """All tables, under a heading a section; an absent figure reads "dry run" or "-"."""
    absent = "dry run" if is_dry else "-"
    lines = ["# Dry run: nothing was measured", ""] if is_dry else ["# The CUDA path", ""]
    for name, tables in sections.items():
        lines += [f"## {name}", ""]
        for title, rows in tables.items():
            lines += [f"{title}:", "", *_table(rows, absent), ""] if rows else []
    return "\n".join(lines)


def _table(rows: Rows, absent: str) -> list[str]:
    columns = list(dict.fromkeys(column for row in rows for column in row))
    is_number = {c: any(isinstance(row.get(c), (int, float)) for row in rows) for c in columns}
    lines = [columns, ["--:" if is_number[column] else "---" for column in columns]]
    lines += [[_cell(row.get(column), absent) for column in columns] for row in rows]
    return [f"| {' | '.join(line)} |" for line in lines]


def _cell(value: object, absent: str) -> str:
    if value is None:
        return absent
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"
    return str(value).replace("|", "\\|").replace("\n", " ")
