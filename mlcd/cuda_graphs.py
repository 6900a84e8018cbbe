"""Records calls on a GPU as CUDA graphs, so that one call starts many small kernels."""

import warnings
from collections.abc import Callable, Hashable
from typing import Final, Generic, TypeVar

import torch

_Key = TypeVar("_Key", bound=Hashable)
_Result = TypeVar("_Result")

# calls before a recording; in them cuBLAS and cuDNN choose their kernels and allocate workspaces
_WARM_UPS: Final = 3


class Recordings(Generic[_Key, _Result]):
    """Runs calls on one device, one at a time; on a GPU each is recorded at its first use.

    Once a recording has failed, calls run without.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._can_record = device, device.type == "cuda"
        self._recorded: dict[_Key, tuple[torch.cuda.CUDAGraph, _Result]] = {}
        # one memory pool for all graphs, because only one runs at a time
        self._memory = torch.cuda.graph_pool_handle() if self._can_record else None

    @property
    def keys(self) -> list[_Key]:
        """The keys of the recorded calls."""
        return [*self._recorded]

    def run(self, key: _Key, call: Callable[[], _Result]) -> _Result:
        """Returns the result of a call, which the next call may overwrite.

        A call of the same key must do the same work on the same tensors. Raises OutOfMemoryError if
        memory does not suffice for a recording.
        """
        if self._can_record and key not in self._recorded:
            self._record(key, call)
        if key not in self._recorded:
            return call()
        graph, result = self._recorded[key]
        graph.replay()
        return result

    def forget(self, is_forgotten: Callable[[_Key], bool]) -> None:
        """Frees the recordings of some keys."""
        for key in filter(is_forgotten, self.keys):
            del self._recorded[key]

    def _record(self, key: _Key, call: Callable[[], _Result]) -> None:
        original_stream = torch.cuda.current_stream(self._device)
        try:
            side = torch.cuda.Stream(self._device)
            side.wait_stream(original_stream)
            with torch.cuda.stream(side):
                for _ in range(_WARM_UPS):
                    call()
            torch.cuda.current_stream(self._device).wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            # other threads of the service may use CUDA while this one records
            with torch.cuda.graph(graph, pool=self._memory, capture_error_mode="thread_local"):
                result = call()
        except RuntimeError as error:
            # torch leaves the recording's stream as the current one
            torch.cuda.set_stream(original_stream)
            torch.cuda.synchronize(self._device)
            if isinstance(error, torch.cuda.OutOfMemoryError):
                raise
            self._can_record = False
            warnings.warn(
                f"running without CUDA graphs, which is slower: {error}",
                RuntimeWarning,
                stacklevel=2,
            )
        else:
            self._recorded[key] = (graph, result)
