"""An example of each route: a `curl` command to a server on the same machine."""

from typing import Final

_URL: Final = "http://127.0.0.1:8000"
_FILE: Final = "file-0661522583affde8e38c4398"
_UPLOAD: Final = "upload_0661522583affde8e38c4398"
_BATCH: Final = "batch_06615225846c3516cd987010"
_HOOK: Final = "webhook_06615225846c3516cd987010"
_JSON: Final = "-H 'Content-Type: application/json'"

# By method and path: curl's options, then the path with its query.
_EXAMPLES: Final = {
    "POST /v1/images/embed": ("-F files=@photo.jpg", "/v1/images/embed"),
    "POST /v1/texts/embed": (f"""{_JSON} -d '{{"texts": ["a red car"]}}'""", "/v1/texts/embed"),
    "POST /v1/labels": ("-F files=@photo.jpg", "/v1/labels?top=3"),
    "POST /v1/classify": (
        """-F files=@photo.jpg -F 'names=["cat", "dog"]' -F templates=simple""",
        "/v1/classify",
    ),
    "GET /v1/centers": ("", "/v1/centers?collection=photos&examples=4"),
    "GET /v1/centers/{center}": ("", "/v1/centers/3"),
    "PATCH /v1/centers/{center}": (
        f"""-X PATCH {_JSON} -d '{{"name": "cats"}}'""",
        "/v1/centers/3",
    ),
    "GET /v1/centers/{center}/members": ("", "/v1/centers/3/members?collection=photos"),
    "GET /v1/centers/{center}/values": (
        "",
        "/v1/centers/3/values?collection=photos&field=camera",
    ),
    "POST /v1/collections/{name}/search": (
        "-F files=@photo.jpg",
        "/v1/collections/photos/search?top=5",
    ),
    "POST /v1/collections/{name}/duplicates": (
        f"""{_JSON} -d '{{"similarity": 0.95}}'""",
        "/v1/collections/photos/duplicates",
    ),
    "GET /v1/collections": ("", "/v1/collections"),
    "PUT /v1/collections/{name}": ("-X PUT", "/v1/collections/photos"),
    "GET /v1/collections/{name}": ("", "/v1/collections/photos"),
    "DELETE /v1/collections/{name}": ("-X DELETE", "/v1/collections/photos"),
    "POST /v1/collections/{name}/items": (
        """-F files=@photo.jpg -F 'items=[{"id": "photo.jpg"}]'""",
        "/v1/collections/photos/items",
    ),
    "GET /v1/collections/{name}/items/{id}": ("", "/v1/collections/photos/items/photo.jpg"),
    "PATCH /v1/collections/{name}/items/{id}": (
        f"""-X PATCH {_JSON} -d '{{"metadata": {{"camera": "phone"}}}}'""",
        "/v1/collections/photos/items/photo.jpg",
    ),
    "DELETE /v1/collections/{name}/items/{id}": (
        "-X DELETE",
        "/v1/collections/photos/items/photo.jpg",
    ),
    "POST /v1/collections/{name}/delete": (
        f"""{_JSON} -d '{{"ids": ["photo.jpg"]}}'""",
        "/v1/collections/photos/delete",
    ),
    "GET /v1/collections/{name}/items/{id}/thumbnail": (
        "-o thumbnail.webp",
        "/v1/collections/photos/items/photo.jpg/thumbnail",
    ),
    "POST /v1/files": ("-F purpose=batch -F file=@requests.jsonl", "/v1/files"),
    "GET /v1/files": ("", "/v1/files"),
    "GET /v1/files/{file_id}": ("", f"/v1/files/{_FILE}"),
    "GET /v1/files/{file_id}/content": ("-o answers.jsonl", f"/v1/files/{_FILE}/content"),
    "DELETE /v1/files/{file_id}": ("-X DELETE", f"/v1/files/{_FILE}"),
    "POST /v1/uploads": (
        f"""{_JSON} -d '{{"filename": "requests.jsonl", "purpose": "batch", "bytes": 4096}}'""",
        "/v1/uploads",
    ),
    "POST /v1/uploads/{upload_id}/parts": ("-F data=@part", f"/v1/uploads/{_UPLOAD}/parts"),
    "POST /v1/uploads/{upload_id}/complete": (
        f"""{_JSON} -d '{{"part_ids": ["part_0661522583affde8e38c4398"]}}'""",
        f"/v1/uploads/{_UPLOAD}/complete",
    ),
    "POST /v1/uploads/{upload_id}/cancel": ("-X POST", f"/v1/uploads/{_UPLOAD}/cancel"),
    "POST /v1/batches": (
        f"""{_JSON} -d '{{"input_file_id": "{_FILE}", "endpoint": "/v1/labels", "…": ""}}'""",
        "/v1/batches",
    ),
    "GET /v1/batches": ("", "/v1/batches"),
    "GET /v1/batches/{batch_id}": ("", f"/v1/batches/{_BATCH}"),
    "POST /v1/batches/{batch_id}/cancel": ("-X POST", f"/v1/batches/{_BATCH}/cancel"),
    "POST /v1/webhook_endpoints": (
        f"""{_JSON} -d '{{"url": "https://example.com/hook"}}'""",
        "/v1/webhook_endpoints",
    ),
    "GET /v1/webhook_endpoints": ("", "/v1/webhook_endpoints"),
    "GET /v1/webhook_endpoints/{webhook_id}": ("", f"/v1/webhook_endpoints/{_HOOK}"),
    "POST /v1/webhook_endpoints/{webhook_id}": (
        f"""{_JSON} -d '{{"event_types": ["batch.completed"]}}'""",
        f"/v1/webhook_endpoints/{_HOOK}",
    ),
    "DELETE /v1/webhook_endpoints/{webhook_id}": ("-X DELETE", f"/v1/webhook_endpoints/{_HOOK}"),
    "POST /v1/webhook_endpoints/{webhook_id}/rotate_secret": (
        "-X POST",
        f"/v1/webhook_endpoints/{_HOOK}/rotate_secret",
    ),
    "POST /v1/webhook_endpoints/{webhook_id}/test": (
        "-X POST",
        f"/v1/webhook_endpoints/{_HOOK}/test",
    ),
    "POST /v1/jobs": (
        f"""{_JSON} -d '{{"kind": "label", "input": "/data/photos", "output": "/data/labels"}}'""",
        "/v1/jobs",
    ),
    "GET /v1/jobs": ("", "/v1/jobs?state=running"),
    "GET /v1/jobs/{job_id}": ("", "/v1/jobs/0660d12b9abb7f1c1e25"),
    "DELETE /v1/jobs/{job_id}": ("-X DELETE", "/v1/jobs/0660d12b9abb7f1c1e25"),
    "GET /v1/jobs/{job_id}/failures": ("", "/v1/jobs/0660d12b9abb7f1c1e25/failures"),
    "POST /v1/jobs/{job_id}/retry": ("-X POST", "/v1/jobs/0660d12b9abb7f1c1e25/retry"),
    "GET /v1/jobs/{job_id}/events": ("-N", "/v1/jobs/0660d12b9abb7f1c1e25/events"),
    "GET /v1/exploration": ("", "/v1/exploration"),
    "POST /v1/exploration": (f"""{_JSON} -d '{{"clusters": 40}}'""", "/v1/exploration"),
    "GET /v1/exploration/skipped": ("", "/v1/exploration/skipped"),
    "POST /v1/embeddings": (
        f"""{_JSON} -d '{{"model": "starter", "input": "a red car"}}'""",
        "/v1/embeddings",
    ),
    "POST /v2/embed": (
        f"""{_JSON} -d '{{"model": "starter", "input_type": "search_query", "texts": ["car"]}}'""",
        "/v2/embed",
    ),
    "GET /v1/models": ("", "/v1/models"),
    "GET /v1/info": ("", "/v1/info"),
    "GET /v1/usage": ("", "/v1/usage?from=2026-11-01&to=2026-11-28"),
    "GET /v2": ("", "/v2"),
    "GET /health/ready": ("", "/health/ready"),
    "GET /metrics": ("", "/metrics"),
}


def example_of(method: str, path: str) -> str | None:
    """Returns a command line for a route, or None for a route that resembles another one."""
    example = _EXAMPLES.get(f"{method.upper()} {path}")
    if example is None:
        return None
    options, path_and_query = example
    return " ".join(filter(None, ("curl -s", options, f"'{_URL}{path_and_query}'")))
