"""A vLLM plugin that registers the weight transfer backend `gloo`."""

NAME = "gloo"


def register() -> None:
    """Registers the backend. vLLM calls this function in each of its processes."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    # vLLM may call it more than once.
    if NAME not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(NAME, "levade_vllm.engine", "GlooEngine")
