"""Manifests into ``inject``: any text gives a text or one clear error; a second injection changes nothing; comments stay."""

from __future__ import annotations

from sidecar.kubernetes.inject import NotInjectable, Options, inject_text
from sidecar.kubernetes.inject.options import with_given
from tests.fuzz.target import check_text

INSTRUMENTED = ("sidecar.kubernetes.inject",)
IS_JSON = True
MOST_BYTES = 6000
OPTIONS = with_given(Options(), {"store": "s3://bucket/runs/{name}"})
WORDS = (
    *(
        b"apiVersion: ",
        b"kind: Job\n",
        b"kind: Pod\n",
        b"kind: List\n",
        b"items:\n",
        b"\n---\n",
        b"metadata:\n",
        b"spec:\n",
        b"template:\n",
    ),
    *(
        b"containers:\n",
        b"- name: ",
        b"initContainers: []\n",
        b"command: [",
        b"args:\n",
        b"env:\n",
        b"volumeMounts:\n",
        b"emptyDir: {}\n",
    ),
    *(
        b"&a ",
        b"*a",
        b"<<: *a",
        b"!!int ",
        b"!!binary ",
        b"!x ",
        b"|\n",
        b">-\n",
        b"# a comment\n",
        b"? ",
        b"%YAML 1.1\n",
        b"\xef\xbb\xbf",
    ),
    *(
        b"\r\n",
        b"\t",
        b"{a: b}",
        b"[1, 2]",
        b"null",
        b"~",
        b"2001-01-01",
        b"\xc2\x85",
        b"\xe2\x80\xa8",
        b'"\\ud800"',
        b"1_000",
        b"0o7",
    ),
)


def check(raw: bytes) -> None:
    try:
        text = raw.decode()
    except UnicodeDecodeError:
        return  # refused where the file is read
    try:
        done = inject_text(text, OPTIONS)
    except NotInjectable as error:
        check_text(error)
        return
    done.text.encode()
    again = inject_text(done.text, OPTIONS)
    assert again.text == done.text, "a second injection changes it"
    assert again.pods == done.pods
    comments = [line.strip() for line in text.splitlines() if line.lstrip(" -").startswith("# ")]
    left = iter(done.text.splitlines())
    missing = [comment for comment in comments if not any(comment in line for line in left)]
    assert not missing, f"comments are gone: {missing}"
