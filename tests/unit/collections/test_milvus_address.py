"""The URLs of Milvus: the index that they ask for."""

import pytest

from mlcd.collections.milvus.address import MilvusAddress
from mlcd.errors import ConfigInvalid


@pytest.mark.parametrize(
    ("asked", "kind"), [("", "hnsw"), ("?index=hnsw", "hnsw"), ("?index=ivf_flat", "ivf_flat")]
)
def test_a_url_chooses_the_index(asked, kind):
    assert MilvusAddress.of(f"milvus://host/photos{asked}").index_kind.kind == kind


@pytest.mark.parametrize("asked", ["diskann", "DISKANN"])
def test_diskann_is_refused_with_the_indexes_that_are_offered(asked):
    with pytest.raises(ConfigInvalid) as caught:
        MilvusAddress.of(f"milvus://root:secret@host/photos?index={asked}")
    said = str(caught.value)
    assert "the index diskann in the URL of milvus://host/photos is not offered" in said
    assert said.endswith("give one of hnsw, ivf_flat")
    assert "secret" not in said
    assert "\n" not in said
