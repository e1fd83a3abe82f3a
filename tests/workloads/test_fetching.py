"""`kvtwin fetch`, against a server in this process that breaks off, lies and refuses; nothing outside is asked."""

from __future__ import annotations

import hashlib
import re
import socket
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from sim.commands.fetch import main
from workloads import fetching, published
from workloads.errors import UserError
from workloads.fetching import cache_folder, fetch
from workloads.published import PUBLISHED, Published

CONTENT = b"TIMESTAMP,ContextTokens,GeneratedTokens\n" + b"2023-11-16 18:15:46,374,44\n" * 40_000
SHA256 = hashlib.sha256(CONTENT).hexdigest()
Answer = Callable[["Handler"], None]


class Handler(BaseHTTPRequestHandler):
    """Answers as the server's list says, one entry a request; the last one goes on."""

    server: Server

    def do_GET(self) -> None:
        self.server.asked.append(dict(self.headers))
        answers = self.server.answers
        with suppress(ConnectionError):
            (answers.pop(0) if len(answers) > 1 else answers[0])(self)

    def log_message(self, format: str, *args: Any) -> None:
        pass


class Server(ThreadingHTTPServer):
    """Keeps the headers that it was asked with."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answers: list[Answer] = [whole]
        self.asked: list[dict[str, str]] = []

    def trace(self, **facts: Any) -> Published:
        facts = {"sha256": SHA256, "num_bytes": None} | facts
        url = f"http://127.0.0.1:{self.server_port}/files/Trace_1week.csv"
        return Published("mine", "a trace", url, "https://example.org/page", "CC-BY", "Nobody, 2026", **facts)

    @property
    def ranges(self) -> list[str | None]:
        return [headers.get("Range") for headers in self.asked]


def send(handler: Handler, status: int, body: bytes, promised: int | None = None, **headers: str) -> None:
    handler.send_response(status)
    handler.send_header("Content-Length", str(len(body) if promised is None else promised))
    for name, value in headers.items():
        handler.send_header(name.replace("_", "-"), value)
    handler.end_headers()
    handler.wfile.write(body)


def whole(handler: Handler, content: bytes = CONTENT, etag: str = '"1"') -> None:
    """As servers do: a part if one is asked for of the file that they still have."""
    asked = re.fullmatch(r"bytes=(\d+)-", handler.headers.get("Range", ""))
    if asked is None or handler.headers.get("If-Range") != etag:
        return send(handler, 200, content, ETag=etag)
    start = int(asked[1])
    if start >= len(content):
        return send(handler, 416, b"", Content_Range=f"bytes */{len(content)}")
    return send(
        handler, 206, content[start:], ETag=etag, Content_Range=f"bytes {start}-{len(content) - 1}/{len(content)}"
    )


def breaks_off(after: int, **headers: str) -> Answer:
    """Promises all that is left, and hangs up after so many bytes of it."""

    def answer(handler: Handler) -> None:
        asked = re.fullmatch(r"bytes=(\d+)-", handler.headers.get("Range", ""))
        start = int(asked[1]) if asked else 0
        place = {"Content_Range": f"bytes {start}-{len(CONTENT) - 1}/{len(CONTENT)}"} if asked else {}
        left = len(CONTENT) - start
        named = headers or {"ETag": '"1"'}
        send(handler, 206 if asked else 200, CONTENT[start : start + after], left, **named, **place)

    return answer


def status(code: int) -> Answer:
    return lambda handler: send(handler, code, b"no")


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def names(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir())


def test_a_trace_is_fetched_once_checked_and_noted(server: Server, tmp_path: Path) -> None:
    seen: list[tuple[int, int | None]] = []
    folder = tmp_path / "new" / "folder"
    fetched = fetch(server.trace(), folder, lambda done, total: seen.append((done, total)))
    assert (fetched.path, fetched.sha256, fetched.checked, fetched.downloaded) == (
        folder / "mine.csv",
        SHA256,
        "publisher",
        True,
    )
    assert fetched.path.read_bytes() == CONTENT
    assert names(folder) == ["mine.csv", "mine.csv.sha256"]
    assert (folder / "mine.csv.sha256").read_text() == f"{SHA256}  mine.csv\n"
    assert seen[-1] == (len(CONTENT), len(CONTENT))
    assert seen == sorted(seen)
    again = fetch(server.trace(), folder)
    assert (again.path, again.downloaded, len(server.asked)) == (fetched.path, False, 1)


def test_a_download_that_breaks_off_goes_on_where_it_was(server: Server, tmp_path: Path) -> None:
    server.answers = [breaks_off(100_000), breaks_off(300_000), whole]
    assert fetch(server.trace(), tmp_path, pauses_s=(0.0,)).path.read_bytes() == CONTENT
    assert server.ranges == [None, "bytes=100000-", "bytes=400000-"]
    assert {headers.get("If-Range") for headers in server.asked[1:]} == {'"1"'}


def test_bytes_that_come_give_new_tries(server: Server, tmp_path: Path) -> None:
    # Ten breaks with one further try allowed: each brings something across, so none is the last.
    server.answers = [breaks_off(100_000)] * 10 + [whole]
    assert fetch(server.trace(), tmp_path, pauses_s=(0.0,)).sha256 == SHA256
    assert len(server.asked) == 11


def test_the_next_command_goes_on_where_the_last_one_gave_up(server: Server, tmp_path: Path) -> None:
    server.answers = [breaks_off(100_000), status(503)]
    with pytest.raises(UserError, match=r"HTTP 503.*; what has come is kept, and the same command goes on from there"):
        fetch(server.trace(), tmp_path, pauses_s=(0.0, 0.0))
    assert len(server.asked) == 1 + 3  # the first, and after it three without a byte
    assert names(tmp_path) == ["mine.csv.part", "mine.csv.part.tag"]
    server.answers = [whole]
    assert fetch(server.trace(), tmp_path).path.read_bytes() == CONTENT
    assert server.ranges[-1] == "bytes=100000-"
    assert names(tmp_path) == ["mine.csv", "mine.csv.sha256"]


def test_a_file_that_has_changed_meanwhile_is_fetched_anew(server: Server, tmp_path: Path) -> None:
    server.answers = [breaks_off(100_000), lambda handler: whole(handler, CONTENT, '"2"')]
    assert fetch(server.trace(), tmp_path, pauses_s=(0.0,)).path.read_bytes() == CONTENT
    assert server.ranges == [None, "bytes=100000-"]  # answered with the whole of the new file


@pytest.mark.parametrize("headers", [{"ETag": 'W/"1"'}, {"Server": "old"}])
def test_a_server_that_cannot_name_its_file_is_asked_for_all_of_it(
    headers: dict[str, str], server: Server, tmp_path: Path
) -> None:
    server.answers = [breaks_off(100_000, **headers), whole]
    assert fetch(server.trace(), tmp_path, pauses_s=(0.0,)).path.read_bytes() == CONTENT
    assert server.ranges == [None, None]


def test_a_date_will_do_where_there_is_no_strong_etag(server: Server, tmp_path: Path) -> None:
    date = "Wed, 21 Oct 2015 07:28:00 GMT"
    server.answers = [
        breaks_off(100_000, ETag='W/"1"', Last_Modified=date),
        lambda handler: whole(handler, CONTENT, date),
    ]
    assert fetch(server.trace(), tmp_path, pauses_s=(0.0,)).path.read_bytes() == CONTENT
    assert server.asked[1]["If-Range"] == date


def test_another_part_than_the_one_asked_for_is_not_taken(server: Server, tmp_path: Path) -> None:
    def elsewhere(handler: Handler) -> None:
        send(handler, 206, CONTENT[7:], ETag='"1"', Content_Range=f"bytes 7-{len(CONTENT) - 1}/{len(CONTENT)}")

    server.answers = [breaks_off(100_000), elsewhere, whole]
    assert fetch(server.trace(), tmp_path, pauses_s=(0.0,)).path.read_bytes() == CONTENT
    assert server.ranges == [None, "bytes=100000-", None]


def test_a_part_that_is_the_whole_file_already_is_taken_as_it_is(server: Server, tmp_path: Path) -> None:
    (tmp_path / "mine.csv.part").write_bytes(CONTENT)
    (tmp_path / "mine.csv.part.tag").write_text('"1"')
    assert fetch(server.trace(), tmp_path).path.read_bytes() == CONTENT
    assert server.ranges == [f"bytes={len(CONTENT)}-"]
    assert names(tmp_path) == ["mine.csv", "mine.csv.sha256"]


def test_a_part_that_is_longer_than_the_file_is_thrown_away(server: Server, tmp_path: Path) -> None:
    (tmp_path / "mine.csv.part").write_bytes(CONTENT + b"more")
    (tmp_path / "mine.csv.part.tag").write_text('"1"')
    assert fetch(server.trace(), tmp_path, pauses_s=(0.0,)).path.read_bytes() == CONTENT


def test_a_wrong_checksum_removes_the_download(server: Server, tmp_path: Path) -> None:
    server.answers = [lambda handler: whole(handler, CONTENT[:-1] + b"x")]
    with pytest.raises(UserError) as error:
        fetch(server.trace(), tmp_path)
    assert f"expected {SHA256}" in str(error.value) and "The download was removed; try again" in str(error.value)
    assert "https://example.org/page" in str(error.value) and "\n" not in str(error.value)
    assert names(tmp_path) == []


def test_where_no_checksum_is_known_the_first_fetch_is_trusted_and_noted(server: Server, tmp_path: Path) -> None:
    trace = server.trace(sha256=None)
    assert fetch(trace, tmp_path).checked == "nothing"
    assert fetch(trace, tmp_path).checked == "first fetch"
    (tmp_path / "mine.csv").unlink()
    server.answers = [lambda handler: whole(handler, b"another file")]
    with pytest.raises(UserError, match=rf"expected {SHA256}, of first fetch.*remove \S*mine.csv.sha256"):
        fetch(trace, tmp_path)
    assert names(tmp_path) == ["mine.csv.sha256"]


def test_a_file_that_was_changed_here_is_not_taken(server: Server, tmp_path: Path) -> None:
    path = fetch(server.trace(), tmp_path).path
    path.write_bytes(CONTENT + b"\n")
    with pytest.raises(UserError, match=r"is not what was fetched.*Remove it and fetch it again"):
        fetch(server.trace(), tmp_path)


@pytest.mark.parametrize("code", [401, 403, 404, 410])
def test_what_is_not_there_is_asked_for_once(code: int, server: Server, tmp_path: Path) -> None:
    server.answers = [status(code)]
    with pytest.raises(UserError, match=rf"HTTP {code} .*See https://example.org/page for where"):
        fetch(server.trace(), tmp_path)
    assert len(server.asked) == 1
    assert names(tmp_path) == []


def test_what_may_pass_is_tried_again(server: Server, tmp_path: Path) -> None:
    server.answers = [status(503), status(429), whole]
    assert fetch(server.trace(), tmp_path, pauses_s=(0.0, 0.0)).sha256 == SHA256


def test_a_web_page_is_not_a_trace(server: Server, tmp_path: Path) -> None:
    server.answers = [lambda handler: send(handler, 200, b"<html>log in", Content_Type="text/html; charset=utf-8")]
    with pytest.raises(UserError, match="answers with a web page and not with the file, perhaps a network's login"):
        fetch(server.trace(sha256=None), tmp_path)
    assert names(tmp_path) == []


def test_a_file_of_another_size_is_not_even_begun(server: Server, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=rf"has {len(CONTENT):,} bytes; expected 1,234"):
        fetch(server.trace(sha256=None, num_bytes=1234), tmp_path)
    assert names(tmp_path) == []


def test_an_answer_that_is_no_http_is_one_line(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def hang_up() -> None:
            for _ in range(2):
                connection, _ = listener.accept()
                connection.recv(4096)
                connection.sendall(b"what?\r\n\r\n")
                connection.close()

        thread = Thread(target=hang_up, daemon=True)
        thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/t.csv"
        with pytest.raises(UserError, match="cannot fetch") as error:
            fetch(Published("mine", "", url, "", "", ""), tmp_path, pauses_s=(0.0,))
        thread.join()
    assert "\n" not in str(error.value)


def test_no_network_is_one_line(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    for host in (f"127.0.0.1:{port}", "nowhere.invalid"):
        with pytest.raises(UserError, match=rf"cannot fetch http://{host}/t.csv: .*Check the network") as error:
            fetch(Published("mine", "", f"http://{host}/t.csv", "", "", ""), tmp_path, pauses_s=())
        assert "\n" not in str(error.value)


def test_a_full_disk_is_one_line(server: Server, tmp_path: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("there is no /dev/full to write to")
    (tmp_path / "mine.csv.part").symlink_to("/dev/full")
    with pytest.raises(
        UserError, match=r"No space left on device; free some space or choose another.*fetch\.dir="
    ) as error:
        fetch(server.trace(), tmp_path)
    assert "\n" not in str(error.value)


def test_a_folder_that_cannot_be_made_is_one_line(server: Server, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot write .*file/sub: .*fetch\.dir="):
        fetch(server.trace(), tmp_path / "file" / "sub")


def test_the_cache_is_where_xdg_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/some/where")
    assert cache_folder() == Path("/some/where/kvtwin")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # which the specification says to ignore
    monkeypatch.setenv("HOME", "/home/me")
    assert cache_folder() == Path("/home/me/.cache/kvtwin")


def test_the_command_fetches_and_says_how_to_go_on(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(published, "PUBLISHED", {"mine": server.trace(sha256=None, options="workload.limit=3")})
    folder = tmp_path / "my traces"
    assert main(["mine", f"fetch.dir='{folder}'"]) == 0
    printed = capsys.readouterr()
    assert printed.out.splitlines() == [
        "mine: a trace",
        "licence CC-BY; cite Nobody, 2026; https://example.org/page",
        f"sha256 {SHA256}, not verified: trusted as the first fetch, and noted in mine.csv.sha256",
        f"{folder}/mine.csv",
        f"""kvtwin sim workload=trace workload.path=''"'"'{folder}/mine.csv'"'"'' workload.limit=3""",
    ]
    assert printed.err == ""  # no bar where there is no terminal
    assert main([f"fetch.dir='{folder}'"]) == 0
    assert re.search(r"mine .* a trace .* CC-BY .* first fetch .* yes", capsys.readouterr().out)
    with pytest.raises(UserError, match=r"there is no trace named mime; did you mean mine\?"):
        main(["mime"])
    with pytest.raises(UserError, match="one trace at a time, not mine and yours"):
        main(["mine", "yours"])


def test_the_table_is_sound() -> None:
    for name, trace in PUBLISHED.items():
        assert name == trace.name
        assert trace.url.startswith("https://") and trace.page.startswith("https://github.com/")
        assert re.fullmatch(r"[a-z0-9_]+\.(csv|csv\.gz|jsonl)", trace.file_name)
        assert trace.sha256 is None or re.fullmatch("[0-9a-f]{64}", trace.sha256)
        assert trace.licence and trace.citation
    assert len({trace.url for trace in PUBLISHED.values()}) == len(PUBLISHED)


@pytest.mark.parametrize("name", [name for name, trace in PUBLISHED.items() if trace.sha256 is not None])
def test_checksums_are_those_of_the_real_files(name: str, real_trace: Callable[[str], str]) -> None:
    path = Path(real_trace(PUBLISHED[name].file_name))
    assert fetching._sha256(path) == PUBLISHED[name].sha256
    assert path.stat().st_size == PUBLISHED[name].num_bytes
