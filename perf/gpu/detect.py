"""Finds the device, and compiles the kernels for it: the first step that needs either."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import fastkern
from fastkern.device.compile import compile_entry
from fastkern.device.open_driver import open_driver
from fastkern.device.sources import entry_names
from fastkern.errors import CompileError, DeviceUnavailableError

from .record import Record


def find_target(wanted: str) -> str:
    """The target to use. Raises DeviceUnavailableError saying what was tried and why it failed."""
    failures = []
    for target in ("cuda", "hip") if wanted == "auto" else (wanted,):
        try:
            open_driver(target).close()
        except DeviceUnavailableError as error:
            failures.append(f"{target}: {error}")
        else:
            return target
    raise DeviceUnavailableError("no GPU can be opened here. " + " | ".join(failures))


def main() -> None:
    """Writes the target's name to --target-file, for the steps that follow."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", required=True, choices=("auto", "cuda", "hip", "host"))
    parser.add_argument("--target-file", required=True, type=Path)
    parser.add_argument("--out", required=True, type=Path)
    args = parser.parse_args()
    record = Record(args.out)
    try:
        target = find_target(args.target)
    except DeviceUnavailableError as error:
        record.add_facts(detail=str(error))
        raise SystemExit(f"{error}") from error
    driver = open_driver(target)
    properties = driver.properties()
    driver.close()
    record.add_facts(
        target=target,
        device=properties.name,
        architecture=properties.architecture,
        processors=properties.num_processors,
        memory_bytes=properties.memory_bytes,
        package=fastkern.__file__,
    )
    args.target_file.write_text(target)
    if target == "host":
        record.add_facts(detail="the host target's kernels, part of the package")
        return
    failed = False
    for entry in entry_names(target):
        start = time.monotonic()
        image, log = b"", ""
        try:
            image = compile_entry(entry, target, properties.architecture)
        except CompileError as failure:
            log, failed = str(failure), True
        seconds = time.monotonic() - start
        record.add_case("compile", entry, not log, seconds, log)
        print(f"{entry}: {len(image)} bytes in {seconds:.1f} s {log}", flush=True)
    if failed:
        raise SystemExit("a kernel does not compile")


if __name__ == "__main__":
    main()
