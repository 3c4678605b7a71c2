"""s3fs: ``put_file`` in four threads, as the Kubeflow SDK uploads checkpoints, and ``get``; without hash and checksum."""

from concurrent.futures import ThreadPoolExecutor

from benchmarks.peers.program import UNSIGNED, Transfer, main

THREADS = 4


def up(transfer: Transfer) -> None:
    import s3fs

    files = s3fs.S3FileSystem(endpoint_url=transfer.endpoint, config_kwargs=UNSIGNED)
    with ThreadPoolExecutor(THREADS) as threads:
        list(threads.map(lambda upload: files.put_file(str(upload[0]), f"{transfer.bucket}/{upload[1]}"), transfer.uploads()))


def down(transfer: Transfer) -> None:
    import s3fs

    files = s3fs.S3FileSystem(endpoint_url=transfer.endpoint, config_kwargs=UNSIGNED)
    files.get(f"{transfer.bucket}/{transfer.prefix}/", f"{transfer.folder}/", recursive=True)


if __name__ == "__main__":
    main(up, down)
