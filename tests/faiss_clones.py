"""Indexes on the CPU in the role of faiss's on a GPU, at the calls that only its wheels for GPUs
have.
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
        "GpuIndexCagra": GraphAsCagra,
        "SearchParametersCagra": cagra_parameters,
        "search_algo_SINGLE_CTA": 0,
    }.items():
        monkeypatch.setattr(faiss, name, fake, raising=False)
    monkeypatch.setattr(gpu_copy, "_PATIENCE_S", 60)
    monkeypatch.setattr(module, "searches_on_gpus", module.searches_on_gpus.__wrapped__)
    return copied


def cagra_parameters(*, algo, itopk_size, sel=None):
    import faiss

    assert algo == faiss.search_algo_SINGLE_CTA
    options = {} if sel is None else {"sel": sel}
    return faiss.SearchParametersHNSW(efSearch=itopk_size, **options)


class GraphAsCagra:
    """A graph of the CPU in CAGRA's role, within CAGRA's bounds."""

    def __init__(self, resources, dimension, metric):
        import faiss

        assert isinstance(resources, Anything)
        self._index = faiss.IndexHNSWFlat(dimension, 32, metric)

    def train_c(self, num_rows, pointer):
        import faiss

        dimension = self._index.d
        self._index.add(faiss.rev_swig_ptr(pointer, num_rows * dimension).reshape(-1, dimension))

    def search(self, queries, top, *, params):
        assert 0 < top <= params.efSearch <= 512
        assert 0 < len(queries) <= 256
        return self._index.search(queries, top, params=params)
