"""transformers, in our own environment; ``modes`` maps a name to a method of measure/peer_transformers.py."""

from __future__ import annotations

from foredraft_worker import generate
from worker import Pipe, settings


def main() -> None:
    asked = settings()
    pipe = Pipe()
    import torch
    import transformers

    from foredraft import EngineConfig
    from foredraft.measure.peer_transformers import PeerModel, TransformersArm

    torch.set_num_threads(asked["threads"])
    peer = PeerModel(EngineConfig(model=asked["model"]), None)
    modes = {name: generate(TransformersArm(peer, method, None)) for name, method in asked["modes"].items()}
    pipe.serve(modes, versions={"transformers": transformers.__version__}, dtype=str(peer.model.dtype))


if __name__ == "__main__":
    main()
