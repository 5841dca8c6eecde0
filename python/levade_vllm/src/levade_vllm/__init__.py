"""A plugin of vLLM: registers the weight transfer backend `gloo`."""

NAME = "gloo"


def register() -> None:
    """Called by vLLM in each of its processes."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    # vLLM may call it more than once.
    if NAME not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(NAME, "levade_vllm.engine", "GlooEngine")
