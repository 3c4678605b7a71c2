"""Durable training from a notebook, with the Kubeflow SDK.

```python
from kubeflow.trainer import CustomTrainer, TrainerClient
from checkpoint_sidecar.kubeflow import durable, progress, wait

client = TrainerClient()
job = client.train(
    trainer=CustomTrainer(func=train, num_nodes=2),
    options=[durable(store="s3:///runs/{name}", data_connection="aws-connection-1", save_steps=500, keep=3)],
)
print(progress(job, client))       # durable step, what is at risk, each pod
wait(job, client)                  # until the job has ended
```
"""

from __future__ import annotations

from checkpoint_sidecar._durable import Durable, durable
from checkpoint_sidecar._progress import NotDurable, Progress, TrainingFailed, progress, wait

__all__ = ["Durable", "NotDurable", "Progress", "TrainingFailed", "durable", "progress", "wait"]
