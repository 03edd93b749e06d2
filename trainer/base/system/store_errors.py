"""Errors of requests to object stores: one line with the object, the operation and the reason, from the messages of the package
obstore, which have many lines."""

import os
import re
from collections.abc import Mapping

from trainer.base.system.streams import without_credentials

_REASONS = (
    (r"No space left on device|Disk quota exceeded|StorageFull", "disk", "no space is left on the disk"),
    (r"169\.254\.16[09]\.|metadata\.google|MissingAccessKey|no credentials", "denied", "there are no credentials ({ways})"),
    (r"ExpiredToken|TokenRefreshRequired|token.{0,40}expired", "denied", "the credentials of {names} have expired"),
    (r"InvalidAccessKeyId", "denied", "the store does not know the access key of {names}"),
    (r"SignatureDoesNotMatch", "denied", "the secret key does not belong to the access key of {names}"),
    (r"RequestTimeTooSkewed", "denied", "the clock of this machine differs from that of the store"),
    (r"NoSuchBucket|InvalidBucketName|ContainerNotFound", "no bucket", "there is no such bucket"),
    (r"PermanentRedirect|AuthorizationHeaderMalformed|status code: 301", "denied",
     "the bucket is in another region (AWS_REGION)"),
    (r"AccessDenied|status code: 403|Forbidden", "denied", "access is denied to {names}"),
    (r"status code: 401|Unauthorized", "denied", "the credentials of {names} are refused"),
    (r"(Path \"[^\"]{0,200}\" contained [^\n]{0,80})|Could not parse path|invalid path", "refused",
     "an object below has a name that cannot be read: {1}"),
    (r"Missing (SecretAccessKey|AccessKeyId)", "denied", "of the two keys, one is missing ({ways})"),
    (r"NoSuchKey|status code: 404|not found", "missing", "there is no such object"),
    (r"status code: 412|already exists|PreconditionFailed|ConditionalRequestConflict|status code: 409", "changed",
     "the object has been changed by another writer"),
    (r"SlowDown|status code: 503|status code: 429", "busy", "the store is overloaded"),
    (r"dns error|failed to lookup|Name or service not known", "unreachable", "the name of the host {host} cannot be resolved"),
    (r"certificate|tls|TLS|SSL|handshake|InvalidContentType", "unreachable", "the TLS connection to {host} fails"),
    (r"kind: Interrupted|error decoding response body|IncompleteMessage|ConnectionReset|BrokenPipe", "lost",
     "the connection to {host} was lost"),
    (r"timed out|TimedOut|operation timed out", "unreachable", "{host} does not answer in time"),
    (r"kind: Connect|Connection refused|connection error", "unreachable", "{host} cannot be reached"),
    (r"status code: (5\d\d)", "busy", "the store fails with status {1}"),
    (r"status code: (\d+)", "refused", "the store refuses with status {1}"),
)  # fmt: skip
"""Pattern of obstore's message, which has many lines -> kind of error, and reason."""
_VARIABLES = {
    "s3": ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"),
    "gs": ("GOOGLE_APPLICATION_CREDENTIALS",),
    "az": ("AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ACCOUNT_KEY"),
    "file": (),
}


class StoreError(Exception):
    """Failure of a request. The message is one line with the object, the operation and the reason, without credentials."""

    def __init__(self, message: str, kind: str = "other"):
        super().__init__(without_credentials(message))
        self.kind = kind
        """"missing", "damaged", "changed", "denied", "no bucket", "refused", "busy", "lost", "unreachable",
        "disk", "stopped" or "other"."""


def failure(name: str, scheme: str, verb: str, error: Exception) -> StoreError:
    """Return an error with the reason that obstore's message contains.

    Args:
        name: URL of the object.
        scheme: That of the store.
        verb: What could not be done, such as "read".
        error: That of the package.
    """
    text = str(error)
    names = " and ".join(name for name in _VARIABLES[scheme] if name in os.environ) or "this machine"
    host = re.search(r"https?://([^/\s\",?]+)", text)
    words: Mapping[str, str] = {
        "names": names,
        "ways": f"set {' and '.join(_VARIABLES[scheme])}, or use the role of the machine",
        "host": host[1] if host else "the store",
    }
    for pattern, kind, reason in _REASONS:
        if match := re.search(pattern, text):
            text = reason.format(match[0], *match.groups(), **words)
            return StoreError(f"{name}: cannot be {verb}: {text}", kind)
    first = text.splitlines()[0] if text else type(error).__name__
    return StoreError(f"{name}: cannot be {verb}: {re.sub(r'Error performing .*? - ', '', first)[:200]}")
