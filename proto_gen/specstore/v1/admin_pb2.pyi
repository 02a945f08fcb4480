from proto_gen.specstore.v1 import drafting_pb2 as _drafting_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Tier(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TIER_UNSPECIFIED: _ClassVar[Tier]
    TIER_PRIOR: _ClassVar[Tier]
    TIER_LIVE: _ClassVar[Tier]
    TIER_SESSION: _ClassVar[Tier]
    TIER_REJECTED: _ClassVar[Tier]
TIER_UNSPECIFIED: Tier
TIER_PRIOR: Tier
TIER_LIVE: Tier
TIER_SESSION: Tier
TIER_REJECTED: Tier

class Document(_message.Message):
    __slots__ = ("tokens",)
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    tokens: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, tokens: _Optional[_Iterable[int]] = ...) -> None: ...

class WarmupRequest(_message.Message):
    __slots__ = ("namespace", "documents")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    DOCUMENTS_FIELD_NUMBER: _ClassVar[int]
    namespace: _drafting_pb2.Namespace
    documents: _containers.RepeatedCompositeFieldContainer[Document]
    def __init__(self, namespace: _Optional[_Union[_drafting_pb2.Namespace, _Mapping]] = ..., documents: _Optional[_Iterable[_Union[Document, _Mapping]]] = ...) -> None: ...

class WarmupReply(_message.Message):
    __slots__ = ("documents", "tokens")
    DOCUMENTS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    documents: int
    tokens: int
    def __init__(self, documents: _Optional[int] = ..., tokens: _Optional[int] = ...) -> None: ...

class FlushRequest(_message.Message):
    __slots__ = ("namespace", "tier", "session", "all", "workspace")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    ALL_FIELD_NUMBER: _ClassVar[int]
    WORKSPACE_FIELD_NUMBER: _ClassVar[int]
    namespace: _drafting_pb2.Namespace
    tier: Tier
    session: str
    all: bool
    workspace: str
    def __init__(self, namespace: _Optional[_Union[_drafting_pb2.Namespace, _Mapping]] = ..., tier: _Optional[_Union[Tier, str]] = ..., session: _Optional[str] = ..., all: bool = ..., workspace: _Optional[str] = ...) -> None: ...

class FlushReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ForgetRequest(_message.Message):
    __slots__ = ("namespace", "users", "conversations", "verify")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    USERS_FIELD_NUMBER: _ClassVar[int]
    CONVERSATIONS_FIELD_NUMBER: _ClassVar[int]
    VERIFY_FIELD_NUMBER: _ClassVar[int]
    namespace: _drafting_pb2.Namespace
    users: _containers.RepeatedScalarFieldContainer[str]
    conversations: _containers.RepeatedScalarFieldContainer[str]
    verify: bool
    def __init__(self, namespace: _Optional[_Union[_drafting_pb2.Namespace, _Mapping]] = ..., users: _Optional[_Iterable[str]] = ..., conversations: _Optional[_Iterable[str]] = ..., verify: bool = ...) -> None: ...

class ForgetReply(_message.Message):
    __slots__ = ("documents", "tokens", "namespaces", "verification")
    DOCUMENTS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    NAMESPACES_FIELD_NUMBER: _ClassVar[int]
    VERIFICATION_FIELD_NUMBER: _ClassVar[int]
    documents: int
    tokens: int
    namespaces: int
    verification: Verification
    def __init__(self, documents: _Optional[int] = ..., tokens: _Optional[int] = ..., namespaces: _Optional[int] = ..., verification: _Optional[_Union[Verification, _Mapping]] = ...) -> None: ...

class Verification(_message.Message):
    __slots__ = ("files", "bytes", "documents", "texts", "found")
    FILES_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    DOCUMENTS_FIELD_NUMBER: _ClassVar[int]
    TEXTS_FIELD_NUMBER: _ClassVar[int]
    FOUND_FIELD_NUMBER: _ClassVar[int]
    files: int
    bytes: int
    documents: int
    texts: int
    found: int
    def __init__(self, files: _Optional[int] = ..., bytes: _Optional[int] = ..., documents: _Optional[int] = ..., texts: _Optional[int] = ..., found: _Optional[int] = ...) -> None: ...

class EpochRequest(_message.Message):
    __slots__ = ("namespace", "keep")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    KEEP_FIELD_NUMBER: _ClassVar[int]
    namespace: _drafting_pb2.Namespace
    keep: int
    def __init__(self, namespace: _Optional[_Union[_drafting_pb2.Namespace, _Mapping]] = ..., keep: _Optional[int] = ...) -> None: ...

class EpochReply(_message.Message):
    __slots__ = ("epoch", "documents", "tokens")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    DOCUMENTS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    documents: int
    tokens: int
    def __init__(self, epoch: _Optional[int] = ..., documents: _Optional[int] = ..., tokens: _Optional[int] = ...) -> None: ...

class StatsRequest(_message.Message):
    __slots__ = ("namespace",)
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    namespace: _drafting_pb2.Namespace
    def __init__(self, namespace: _Optional[_Union[_drafting_pb2.Namespace, _Mapping]] = ...) -> None: ...

class StatsReply(_message.Message):
    __slots__ = ("namespaces", "uptime_seconds", "version", "streams")
    NAMESPACES_FIELD_NUMBER: _ClassVar[int]
    UPTIME_SECONDS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    STREAMS_FIELD_NUMBER: _ClassVar[int]
    namespaces: _containers.RepeatedCompositeFieldContainer[NamespaceStats]
    uptime_seconds: float
    version: str
    streams: int
    def __init__(self, namespaces: _Optional[_Iterable[_Union[NamespaceStats, _Mapping]]] = ..., uptime_seconds: _Optional[float] = ..., version: _Optional[str] = ..., streams: _Optional[int] = ...) -> None: ...

class NamespaceStats(_message.Message):
    __slots__ = ("namespace", "vocab_size", "sessions", "conversations", "prior", "drafts", "tiers", "merge_failures", "log_bytes", "log_unsynced_bytes", "log_failures", "stored", "epoch")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    CONVERSATIONS_FIELD_NUMBER: _ClassVar[int]
    PRIOR_FIELD_NUMBER: _ClassVar[int]
    DRAFTS_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    MERGE_FAILURES_FIELD_NUMBER: _ClassVar[int]
    LOG_BYTES_FIELD_NUMBER: _ClassVar[int]
    LOG_UNSYNCED_BYTES_FIELD_NUMBER: _ClassVar[int]
    LOG_FAILURES_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    namespace: _drafting_pb2.Namespace
    vocab_size: int
    sessions: int
    conversations: int
    prior: bool
    drafts: int
    tiers: _containers.RepeatedCompositeFieldContainer[TierStats]
    merge_failures: int
    log_bytes: int
    log_unsynced_bytes: int
    log_failures: int
    stored: bool
    epoch: int
    def __init__(self, namespace: _Optional[_Union[_drafting_pb2.Namespace, _Mapping]] = ..., vocab_size: _Optional[int] = ..., sessions: _Optional[int] = ..., conversations: _Optional[int] = ..., prior: bool = ..., drafts: _Optional[int] = ..., tiers: _Optional[_Iterable[_Union[TierStats, _Mapping]]] = ..., merge_failures: _Optional[int] = ..., log_bytes: _Optional[int] = ..., log_unsynced_bytes: _Optional[int] = ..., log_failures: _Optional[int] = ..., stored: bool = ..., epoch: _Optional[int] = ...) -> None: ...

class TierStats(_message.Message):
    __slots__ = ("tier", "tokens", "bytes", "hits", "drafted", "segments", "accepted", "damaged")
    TIER_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    HITS_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_FIELD_NUMBER: _ClassVar[int]
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    DAMAGED_FIELD_NUMBER: _ClassVar[int]
    tier: Tier
    tokens: int
    bytes: int
    hits: int
    drafted: int
    segments: int
    accepted: int
    damaged: int
    def __init__(self, tier: _Optional[_Union[Tier, str]] = ..., tokens: _Optional[int] = ..., bytes: _Optional[int] = ..., hits: _Optional[int] = ..., drafted: _Optional[int] = ..., segments: _Optional[int] = ..., accepted: _Optional[int] = ..., damaged: _Optional[int] = ...) -> None: ...

class ListNamespacesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListNamespacesReply(_message.Message):
    __slots__ = ("namespaces",)
    NAMESPACES_FIELD_NUMBER: _ClassVar[int]
    namespaces: _containers.RepeatedCompositeFieldContainer[_drafting_pb2.Namespace]
    def __init__(self, namespaces: _Optional[_Iterable[_Union[_drafting_pb2.Namespace, _Mapping]]] = ...) -> None: ...

class ListSessionsRequest(_message.Message):
    __slots__ = ("namespace",)
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    namespace: _drafting_pb2.Namespace
    def __init__(self, namespace: _Optional[_Union[_drafting_pb2.Namespace, _Mapping]] = ...) -> None: ...

class ListSessionsReply(_message.Message):
    __slots__ = ("sessions",)
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    sessions: _containers.RepeatedCompositeFieldContainer[SessionInfo]
    def __init__(self, sessions: _Optional[_Iterable[_Union[SessionInfo, _Mapping]]] = ...) -> None: ...

class SessionInfo(_message.Message):
    __slots__ = ("session", "tokens", "prompt_tokens", "bytes", "conversation", "publish")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    CONVERSATION_FIELD_NUMBER: _ClassVar[int]
    PUBLISH_FIELD_NUMBER: _ClassVar[int]
    session: str
    tokens: int
    prompt_tokens: int
    bytes: int
    conversation: str
    publish: bool
    def __init__(self, session: _Optional[str] = ..., tokens: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., bytes: _Optional[int] = ..., conversation: _Optional[str] = ..., publish: bool = ...) -> None: ...

class CompactRequest(_message.Message):
    __slots__ = ("namespace",)
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    namespace: _drafting_pb2.Namespace
    def __init__(self, namespace: _Optional[_Union[_drafting_pb2.Namespace, _Mapping]] = ...) -> None: ...

class CompactReply(_message.Message):
    __slots__ = ("segments", "tokens")
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    segments: int
    tokens: int
    def __init__(self, segments: _Optional[int] = ..., tokens: _Optional[int] = ...) -> None: ...

class WarmupFileRequest(_message.Message):
    __slots__ = ("namespace", "file", "field", "tokenizer")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    FILE_FIELD_NUMBER: _ClassVar[int]
    FIELD_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_FIELD_NUMBER: _ClassVar[int]
    namespace: _drafting_pb2.Namespace
    file: str
    field: str
    tokenizer: str
    def __init__(self, namespace: _Optional[_Union[_drafting_pb2.Namespace, _Mapping]] = ..., file: _Optional[str] = ..., field: _Optional[str] = ..., tokenizer: _Optional[str] = ...) -> None: ...

class WarmupProgress(_message.Message):
    __slots__ = ("documents", "tokens")
    DOCUMENTS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    documents: int
    tokens: int
    def __init__(self, documents: _Optional[int] = ..., tokens: _Optional[int] = ...) -> None: ...

class DropNamespaceRequest(_message.Message):
    __slots__ = ("namespace",)
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    namespace: _drafting_pb2.Namespace
    def __init__(self, namespace: _Optional[_Union[_drafting_pb2.Namespace, _Mapping]] = ...) -> None: ...

class DropNamespaceReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SnapshotRequest(_message.Message):
    __slots__ = ("namespace", "name")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    namespace: _drafting_pb2.Namespace
    name: str
    def __init__(self, namespace: _Optional[_Union[_drafting_pb2.Namespace, _Mapping]] = ..., name: _Optional[str] = ...) -> None: ...

class SnapshotReply(_message.Message):
    __slots__ = ("segments", "tokens")
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    segments: int
    tokens: int
    def __init__(self, segments: _Optional[int] = ..., tokens: _Optional[int] = ...) -> None: ...

class RestoreRequest(_message.Message):
    __slots__ = ("namespace", "name")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    namespace: _drafting_pb2.Namespace
    name: str
    def __init__(self, namespace: _Optional[_Union[_drafting_pb2.Namespace, _Mapping]] = ..., name: _Optional[str] = ...) -> None: ...

class RestoreReply(_message.Message):
    __slots__ = ("segments", "tokens")
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    segments: int
    tokens: int
    def __init__(self, segments: _Optional[int] = ..., tokens: _Optional[int] = ...) -> None: ...

class ListSnapshotsRequest(_message.Message):
    __slots__ = ("namespace",)
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    namespace: _drafting_pb2.Namespace
    def __init__(self, namespace: _Optional[_Union[_drafting_pb2.Namespace, _Mapping]] = ...) -> None: ...

class ListSnapshotsReply(_message.Message):
    __slots__ = ("snapshots",)
    SNAPSHOTS_FIELD_NUMBER: _ClassVar[int]
    snapshots: _containers.RepeatedCompositeFieldContainer[SnapshotInfo]
    def __init__(self, snapshots: _Optional[_Iterable[_Union[SnapshotInfo, _Mapping]]] = ...) -> None: ...

class SnapshotInfo(_message.Message):
    __slots__ = ("name", "tokens", "bytes", "created_seconds", "damage")
    NAME_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    CREATED_SECONDS_FIELD_NUMBER: _ClassVar[int]
    DAMAGE_FIELD_NUMBER: _ClassVar[int]
    name: str
    tokens: int
    bytes: int
    created_seconds: int
    damage: str
    def __init__(self, name: _Optional[str] = ..., tokens: _Optional[int] = ..., bytes: _Optional[int] = ..., created_seconds: _Optional[int] = ..., damage: _Optional[str] = ...) -> None: ...

class SetQuotaRequest(_message.Message):
    __slots__ = ("tenant", "live_bytes", "sessions", "streams", "outputs_per_second", "messages_per_second")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    LIVE_BYTES_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    STREAMS_FIELD_NUMBER: _ClassVar[int]
    OUTPUTS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    live_bytes: int
    sessions: int
    streams: int
    outputs_per_second: int
    messages_per_second: int
    def __init__(self, tenant: _Optional[str] = ..., live_bytes: _Optional[int] = ..., sessions: _Optional[int] = ..., streams: _Optional[int] = ..., outputs_per_second: _Optional[int] = ..., messages_per_second: _Optional[int] = ...) -> None: ...

class SetQuotaReply(_message.Message):
    __slots__ = ("stored",)
    STORED_FIELD_NUMBER: _ClassVar[int]
    stored: bool
    def __init__(self, stored: bool = ...) -> None: ...

class ListQuotasRequest(_message.Message):
    __slots__ = ("tenant",)
    TENANT_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    def __init__(self, tenant: _Optional[str] = ...) -> None: ...

class ListQuotasReply(_message.Message):
    __slots__ = ("tenants",)
    TENANTS_FIELD_NUMBER: _ClassVar[int]
    tenants: _containers.RepeatedCompositeFieldContainer[TenantQuota]
    def __init__(self, tenants: _Optional[_Iterable[_Union[TenantQuota, _Mapping]]] = ...) -> None: ...

class TenantQuota(_message.Message):
    __slots__ = ("tenant", "parts")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    parts: _containers.RepeatedCompositeFieldContainer[QuotaPart]
    def __init__(self, tenant: _Optional[str] = ..., parts: _Optional[_Iterable[_Union[QuotaPart, _Mapping]]] = ...) -> None: ...

class QuotaPart(_message.Message):
    __slots__ = ("name", "limit", "used", "refused")
    NAME_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    USED_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    name: str
    limit: int
    used: int
    refused: int
    def __init__(self, name: _Optional[str] = ..., limit: _Optional[int] = ..., used: _Optional[int] = ..., refused: _Optional[int] = ...) -> None: ...
