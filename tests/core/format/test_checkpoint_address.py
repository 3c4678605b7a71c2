"""Addresses as people write them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.core.format.checkpoint_address import Address, is_address, misnamed, named_checkpoint, parse_address
from trainer_hook.contract import ContractError


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("s3://bucket/runs/a", Address("s3://bucket/runs/a")),
        ("s3://bucket/runs/a/", Address("s3://bucket/runs/a/")),
        ("s3://bucket/runs/a/checkpoint-40", Address("s3://bucket/runs/a", "checkpoint-40")),
        ("s3://bucket/runs/a/checkpoint-40/", Address("s3://bucket/runs/a", "checkpoint-40")),
        ("s3://bucket/final", Address("s3://bucket", "final")),
        ("s3://bucket/checkpoint-040", Address("s3://bucket/checkpoint-040")),
        ("s3://bucket/checkpoint-40~", Address("s3://bucket/checkpoint-40~")),
        ("s3://checkpoint-40", Address("s3://checkpoint-40")),
        ("file:///mnt/a/checkpoint-40", Address("file:///mnt/a", "checkpoint-40")),
    ],
)
def test_the_last_part_may_be_a_checkpoint(text: str, address: Address) -> None:
    assert parse_address(text) == address


@pytest.mark.parametrize(("text", "name"), [("23", "checkpoint-23"), ("checkpoint-23", "checkpoint-23"), ("final", "final")])
def test_a_checkpoint_without_its_store_is_answered_with_the_whole_address(text: str, name: str) -> None:
    with pytest.raises(ContractError) as refused:
        parse_address(text)
    assert f"{text!r} is no store: name the store, too: $CKPT_STORE/{name}" in str(refused.value)


@given(st.text(max_size=40))
def test_any_text_is_an_address_or_is_refused(text: str) -> None:
    try:
        address = parse_address(text)
    except ContractError:
        return
    assert text.startswith(address.store.rstrip("/"))


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("40", "checkpoint-40"),
        ("0", "checkpoint-0"),
        ("9" * 18, "checkpoint-" + "9" * 18),
        ("9" * 19, "9" * 19),
        ("final", "final"),
        ("latest", "latest"),
        ("٤", "٤"),
    ],
)
def test_a_step_alone_is_a_name(text: str, name: str) -> None:
    assert named_checkpoint(text) == name


@pytest.mark.parametrize(
    ("text", "expected"), [("s3://bucket/run", True), ("file:///mnt", True), ("40", False), ("final", False)]
)
def test_an_address_has_a_scheme(text: str, expected: bool) -> None:
    assert is_address(text) is expected


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("s3://b/run/30", "; did you mean s3://b/run/checkpoint-30?"),
        ("s3://b/run/checkpoint-3O", "; 'checkpoint-3O' is no checkpoint's name: checkpoint-<step>, or final"),
        ("s3://b/run/checkpoint-40~/", "; 'checkpoint-40~' is no checkpoint's name: checkpoint-<step>, or final"),
        ("s3://b/run/", ""),
        ("s3://b/run", ""),
    ],
)
def test_what_is_wrong_with_the_end_of_an_address_is_said(text: str, hint: str) -> None:
    assert misnamed(text) == hint
