"""The REST contract: the bodies of requests and answers, as pydantic models.

The service validates requests and writes answers with these models, FastAPI documents them, and
`mlcd.client` reads answers into them. Answers with vectors are an exception: the service writes
them directly from arrays, and their models only document them.

A client may be older than its server. Answers therefore ignore unknown fields, and fields marked
`SkipValidation` accept values that this version does not define.
"""
