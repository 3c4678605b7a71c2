"""obstore: parts of 16 MiB without a hash of the payload up, a stream into the file down; four files at once."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

from benchmarks.peers.program import Transfer, main

PART_BYTES = 16 << 20
THREADS = 4


def up(transfer: Transfer) -> None:
    import obstore

    store = _store(transfer)
    with ThreadPoolExecutor(THREADS) as threads:
        list(threads.map(lambda upload: obstore.put(store, upload[1], upload[0], chunk_size=PART_BYTES), transfer.uploads()))


def down(transfer: Transfer) -> None:
    import obstore

    store = _store(transfer)

    def fetch(key: str) -> None:
        with transfer.target(key).open("wb") as file:
            for block in obstore.get(store, key).stream(min_chunk_size=1 << 20):
                file.write(block)

    keys = [found["path"] for page in obstore.list(store, f"{transfer.prefix}/") for found in page]
    with ThreadPoolExecutor(THREADS) as threads:
        list(threads.map(fetch, keys))


def _store(transfer: Transfer) -> Any:
    from obstore.store import S3Store

    options = {"allow_http": transfer.endpoint.startswith("http:")}
    return S3Store(
        transfer.bucket,
        endpoint=transfer.endpoint,
        virtual_hosted_style_request=False,
        unsigned_payload=True,
        client_options=options,
    )


if __name__ == "__main__":
    main(up, down)
