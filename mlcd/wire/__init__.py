"""The REST contract: the bodies of requests and answers, as pydantic models.

The service validates bodies and writes answers by them, FastAPI documents them, and `mlcd.client`
reads answers into them. Answers with vectors are the exception: the service writes them from
arrays, and their models are documentation there.

A client may be older than its server. Answers therefore ignore unknown fields, and a value that is
marked `SkipValidation` may be one that is not known here.
"""
