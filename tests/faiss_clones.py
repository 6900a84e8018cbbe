"""Clones on the CPU in the role of faiss's copies on a GPU, at the calls that only its wheels for
GPUs have.
"""

from mlcd.indexes import gpu_copy


class Anything:
    """Takes any attribute."""


def let_clones_be_copies(monkeypatch):
    """Returns the list of the indexes that are copied from now on."""
    import faiss

    from mlcd.indexes import faiss as module

    copied = []

    def clone(resources, device, index, options):
        assert (device, options.use_cuvs) == (0, True)
        copied.append(index)
        return faiss.clone_index(index)

    for name, fake in {
        "get_num_gpus": lambda: 1,
        "get_compile_options": lambda: "OPTIMIZE GPU NVIDIA_CUVS ",
        "GpuClonerOptions": Anything,
        "StandardGpuResources": Anything,
        "index_cpu_to_all_gpus": faiss.clone_index,
        "index_cpu_to_gpu": clone,
    }.items():
        monkeypatch.setattr(faiss, name, fake, raising=False)
    monkeypatch.setattr(gpu_copy, "_PATIENCE_S", 60)
    monkeypatch.setattr(module, "_searches_on_gpus", module._searches_on_gpus.__wrapped__)
    return copied
