"""s5cmd. It has no option for an unsigned payload: over HTTP it hashes what it sends."""

from benchmarks.peers.program import Transfer, become, main


def up(transfer: Transfer) -> None:
    become("s5cmd", "--log", "error", "--endpoint-url", transfer.endpoint, "cp", f"{transfer.folder}/", f"{transfer.url}/")


def down(transfer: Transfer) -> None:
    become("s5cmd", "--log", "error", "--endpoint-url", transfer.endpoint, "cp", f"{transfer.url}/*", f"{transfer.folder}/")


if __name__ == "__main__":
    main(up, down)
