"""The AWS command line."""

from benchmarks.peers.program import Transfer, become, main


def up(transfer: Transfer) -> None:
    _copy(transfer, str(transfer.folder), transfer.url)


def down(transfer: Transfer) -> None:
    _copy(transfer, transfer.url, str(transfer.folder))


def _copy(transfer: Transfer, source: str, target: str) -> None:
    become("aws", "s3", "cp", "--recursive", "--only-show-errors", "--endpoint-url", transfer.endpoint, source, target)


if __name__ == "__main__":
    main(up, down)
