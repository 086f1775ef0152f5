"""What both demos show while they run and at the end, and on how many threads they run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table


@contextmanager
def one_thread() -> Iterator[None]:
    """Run PyTorch on one thread: equal operands give equal bits, however many cores there are."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def progress_bar(console: Console) -> Progress:
    """A context manager; shows nothing where the console is no terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def say(console: Console, *lines: str, style: str | None = None) -> None:
    """Print lines as they are, however long."""
    for line in lines:
        console.print(line, style=style, highlight=False, markup=False, soft_wrap=True)


def say_ok(console: Console, text: str) -> None:
    """The last line of a demo that found everything right."""
    console.print()
    console.print("[bold green]OK[/]: ", end="")
    say(console, text)


def show(console: Console, title: str, table: Table) -> None:
    """A table under its title."""
    console.print()
    say(console, title, style="bold")
    console.print(table)


def table_of(*columns: str) -> Table:
    """An empty table: the first column's cells to the left, others to the right."""
    table = Table()
    for k, name in enumerate(columns):
        table.add_column(name, justify="left" if k == 0 else "right")
    return table
