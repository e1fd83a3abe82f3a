"""Which format is this file of? `workload.format=auto`, and the list of those that are known.

A new format is one file of this folder with its `Format`, entered in `FORMATS`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping

from workloads.errors import UserError
from workloads.readers import (
    aiperf_export,
    azure,
    bailian,
    bench_result,
    blis,
    burstgpt,
    converted,
    dynamo,
    llmservingsim,
    mooncake,
    otel,
    sharegpt,
    timestamped_lengths,
    vidur,
)
from workloads.readers.format import Format
from workloads.readers.sample import sample_of
from workloads.readers.token_counts import shown

FORMATS: Mapping[str, Format] = {
    one.name: one
    for one in (
        *azure.FORMATS,
        *burstgpt.FORMATS,
        *mooncake.FORMATS,
        *dynamo.FORMATS,
        *bailian.FORMATS,
        *sharegpt.FORMATS,
        *bench_result.FORMATS,
        *timestamped_lengths.FORMATS,
        *aiperf_export.FORMATS,
        *vidur.FORMATS,
        *converted.FORMATS,
        *blis.FORMATS,
        *llmservingsim.FORMATS,
        *otel.FORMATS,
    )
}
_NO_TRACES = (
    (frozenset({"dataset_arrival_s", "queued_s"}), "is of a recorded run; use workload=recorded_run with its folder"),
    (frozenset({"trace_version: 2"}), "is the header of a BLIS trace; give the CSV beside it"),
    (
        frozenset({"total_input_tokens", "total_output_tokens", "duration"}),
        "is the summary of a benchmark, without its requests; run vllm bench serve with --save-result --save-detailed, "
        "or SGLang's bench_serving with --output-details",
    ),
)


def format_named(name: str) -> Format:
    """The format of that name.

    Raises:
        UserError: there is none.
    """
    if name in FORMATS:
        return FORMATS[name]
    near = difflib.get_close_matches(name, FORMATS, n=1)
    hint = f"did you mean {near[0]}?" if near else f"the formats are auto, {', '.join(sorted(FORMATS))}."
    raise UserError(f"workload.format is {name!r}, which is no format; {hint}")


def recognise(path: str, time_unit: str | None = None) -> Format:
    """The format of the file at `path`, by the names in it. Of several that fit, the one that asks for most names.

    Args:
        path: the file.
        time_unit: of its times, if the user said so: chooses among formats that differ in nothing else.

    Raises:
        UserError: no such file, or none or several formats fit.
    """
    sample = sample_of(path)
    fitting = [one for one in FORMATS.values() if one.fits(sample)]
    most = max((len(one.keys) for one in fitting), default=0)
    best = [one for one in fitting if len(one.keys) == most]
    if len(best) > 1:
        best = [one for one in best if one.unit == time_unit] or best
    if len(best) == 1:
        return best[0]
    names = shown(", ".join(sorted(sample.keys)) or "none")
    if best:
        raise UserError(f"{path} ({names}) may be {_either(best)}; say which with workload.format=.")
    if (reason := _no_trace(sample.keys)) is not None:
        raise UserError(f"{path} {reason}.")
    raise UserError(
        f"{path} is of no format that is known: it is {sample.container} with the names {names}. Say which it is with "
        f"workload.format=, one of {', '.join(sorted(FORMATS))}."
    )


def _no_trace(keys: frozenset[str]) -> str | None:
    """Of a file that is known and holds no requests, why, and what to do."""
    return next((reason for names, reason in _NO_TRACES if names <= keys), None)


def _either(formats: Iterable[Format]) -> str:
    return " or ".join(f"{one.name} ({one.title}; times in {one.unit})" for one in formats)
