"""The AWS command line, without hash and checksum of the payload."""

from pathlib import Path

from benchmarks.peers.program import Transfer, become, main


def up(transfer: Transfer) -> None:
    _copy(transfer, str(transfer.folder), transfer.url)


def down(transfer: Transfer) -> None:
    _copy(transfer, transfer.url, str(transfer.folder))


def _copy(transfer: Transfer, source: str, target: str) -> None:
    fastest = {
        "AWS_CONFIG_FILE": str(Path(__file__).with_name("aws.config")),
        "AWS_REQUEST_CHECKSUM_CALCULATION": "when_required",
        "AWS_RESPONSE_CHECKSUM_VALIDATION": "when_required",
    }
    become(
        "aws", "s3", "cp", "--recursive", "--only-show-errors", "--endpoint-url", transfer.endpoint, source, target, **fastest
    )


if __name__ == "__main__":
    main(up, down)
