"""Public traces and where their publishers keep them, for `kvtwin fetch`. None is part of this package.

A checksum stands here only if the bytes were at hand when this was written. Of the others the first download is
trusted, and its checksum kept beside the file. Sizes are given where they are known to the byte.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Published:
    """A trace that can be fetched.

    Args:
        name: for `kvtwin fetch NAME`.
        title: what it is.
        url: of the file.
        page: the publisher's page about it.
        licence: as the page says.
        citation: of the work to be cited.
        sha256: of the file, in hexadecimal; None if it is not known here.
        num_bytes: size of the file; None if it is not known here.
        options: that `kvtwin sim` needs beside the path.
    """

    name: str
    title: str
    url: str
    page: str
    licence: str
    citation: str
    sha256: str | None = None
    num_bytes: int | None = None
    options: str = ""

    @property
    def file_name(self) -> str:
        """In the cache: the name, and the ending that the publisher's file has."""
        last = self.url.rpartition("/")[2]
        return self.name + last[last.index(".") :]


_AZURE = "https://github.com/Azure/AzurePublicDataset"
_AZURE_FILES = "https://raw.githubusercontent.com/Azure/AzurePublicDataset/master/data"
_BURSTGPT = "https://github.com/HPMLL/BurstGPT"
_MOONCAKE = "https://github.com/kvcache-ai/Mooncake"
_MOONCAKE_FILES = "https://raw.githubusercontent.com/kvcache-ai/Mooncake/main/FAST25-release"
_BAILIAN = "https://github.com/alibaba-edu/qwen-bailian-usagetraces-anon"
_SPLITWISE = "Patel et al., Splitwise, ISCA 2024"
_DYNAMOLLM = "Stojkovic et al., DynamoLLM, HPCA 2025"
_MODSERVE = "Qiu et al., ModServe, SoCC 2025"
_WANG = "Wang et al., BurstGPT, KDD 2025"
_QIN = "Qin et al., Mooncake, FAST 2025"
_BAILIAN_PAPER = "Wang et al., KVCache Cache in the Wild, ATC 2025"
_FAILED = "workload.on_bad_row=drop"  # rows without a response are requests that failed

PUBLISHED: Mapping[str, Published] = {
    trace.name: trace
    for trace in (
        Published(
            "azure_2023_conv",
            "one hour of a chat service, 19,366 requests",
            f"{_AZURE_FILES}/AzureLLMInferenceTrace_conv.csv",
            _AZURE,
            "CC-BY",
            _SPLITWISE,
            "2f1e5b666d4e3055fdbba98598ce2ec307767b9064e03e2fa46676dbcc7d0bf8",
            719_188,
        ),
        Published(
            "azure_2023_code",
            "one hour of a coding service, 8,819 requests",
            f"{_AZURE_FILES}/AzureLLMInferenceTrace_code.csv",
            _AZURE,
            "CC-BY",
            _SPLITWISE,
            "54e9a6d2a4bd06ba1e060304b900abbc74cbea53de96506e60fe5bb4f2277fb6",
            320_117,
        ),
        Published(
            "azure_2024_conv",
            "one week of chat services, about 1.1 GB",
            f"{_AZURE}/releases/download/dataset-llm-2024/AzureLLMInferenceTrace_conv_1week.csv",
            _AZURE,
            "CC-BY",
            _DYNAMOLLM,
        ),
        Published(
            "azure_2024_code",
            "one week of coding services, 16,803,695 requests",
            f"{_AZURE}/releases/download/dataset-llm-2024/AzureLLMInferenceTrace_code_1week.csv",
            _AZURE,
            "CC-BY",
            _DYNAMOLLM,
        ),
        Published(
            "azure_2025_multimodal",
            "one week of a multimodal service",
            f"{_AZURE_FILES}/AzureLMMInferenceTrace_multimodal.csv.gz",
            _AZURE,
            "CC-BY",
            _MODSERVE,
        ),
        Published(
            "burstgpt_1",
            "a campus service of Azure OpenAI, first file, 1,429,737 requests",
            f"{_BURSTGPT}/releases/download/v1.1/BurstGPT_1.csv",
            _BURSTGPT,
            "CC-BY 4.0",
            _WANG,
            options=_FAILED,
        ),
        Published(
            "burstgpt_2",
            "the same service, second file",
            f"{_BURSTGPT}/releases/download/v1.1/BurstGPT_2.csv",
            _BURSTGPT,
            "CC-BY 4.0",
            _WANG,
            options=_FAILED,
        ),
        Published(
            "burstgpt_3",
            "the same service, third file, 5,344,021 requests",
            f"{_BURSTGPT}/releases/download/v2.0/BurstGPT_3.csv",
            _BURSTGPT,
            "CC-BY 4.0",
            _WANG,
            num_bytes=231_682_327,
            options=_FAILED,
        ),
        Published(
            "mooncake_conversation",
            "one hour of Kimi's chat service with prefix hashes, 12,031 requests",
            f"{_MOONCAKE_FILES}/traces/conversation_trace.jsonl",
            _MOONCAKE,
            "Apache-2.0",
            _QIN,
            "b8cbb061a85206d729d91cdc2981f43c9e0d99209dce588d3af5f7934408b9df",
            3_029_533,
        ),
        Published(
            "mooncake_toolagent",
            "one hour of tools and agents with prefix hashes, 23,608 requests",
            f"{_MOONCAKE_FILES}/traces/toolagent_trace.jsonl",
            _MOONCAKE,
            "Apache-2.0",
            _QIN,
        ),
        Published(
            "mooncake_synthetic",
            "made from public data sets, with prefix hashes, 3,993 requests",
            f"{_MOONCAKE_FILES}/traces/synthetic_trace.jsonl",
            _MOONCAKE,
            "Apache-2.0",
            _QIN,
        ),
        Published(
            "mooncake_arxiv",
            "the older trace of the arXiv paper",
            f"{_MOONCAKE_FILES}/arxiv-trace/mooncake_trace.jsonl",
            _MOONCAKE,
            "Apache-2.0",
            _QIN,
        ),
        *(
            Published(
                f"bailian_{name}",
                f"two hours of Alibaba's model service with prefix hashes, {file}",
                f"{_BAILIAN}/raw/refs/heads/main/qwen_{file}_blksz_16.jsonl",
                _BAILIAN,
                "Apache-2.0",
                _BAILIAN_PAPER,
            )
            for name, file in (("a", "traceA"), ("b", "traceB"), ("coder", "coder"), ("thinking", "thinking"))
        ),
    )
}
