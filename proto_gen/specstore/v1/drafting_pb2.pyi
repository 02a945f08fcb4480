from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Status(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    STATUS_UNSPECIFIED: _ClassVar[Status]
    STATUS_OK: _ClassVar[Status]
    STATUS_UNKNOWN_SESSION: _ClassVar[Status]
    STATUS_GAP: _ClassVar[Status]
    STATUS_OVER_BUDGET: _ClassVar[Status]
STATUS_UNSPECIFIED: Status
STATUS_OK: Status
STATUS_UNKNOWN_SESSION: Status
STATUS_GAP: Status
STATUS_OVER_BUDGET: Status

class Namespace(_message.Message):
    __slots__ = ("model", "tokenizer", "tenant")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    model: str
    tokenizer: str
    tenant: str
    def __init__(self, model: _Optional[str] = ..., tokenizer: _Optional[str] = ..., tenant: _Optional[str] = ...) -> None: ...

class DraftRequest(_message.Message):
    __slots__ = ("step", "namespace", "entries", "queries", "existing", "columns")
    STEP_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    QUERIES_FIELD_NUMBER: _ClassVar[int]
    EXISTING_FIELD_NUMBER: _ClassVar[int]
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    step: int
    namespace: Namespace
    entries: _containers.RepeatedCompositeFieldContainer[Entry]
    queries: Queries
    existing: bool
    columns: EntryColumns
    def __init__(self, step: _Optional[int] = ..., namespace: _Optional[_Union[Namespace, _Mapping]] = ..., entries: _Optional[_Iterable[_Union[Entry, _Mapping]]] = ..., queries: _Optional[_Union[Queries, _Mapping]] = ..., existing: bool = ..., columns: _Optional[_Union[EntryColumns, _Mapping]] = ...) -> None: ...

class EntryColumns(_message.Message):
    __slots__ = ("sessions", "starts", "tokens", "counts", "nodes", "depths", "children", "tenants", "more")
    class MoreEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: Entry
        def __init__(self, key: _Optional[int] = ..., value: _Optional[_Union[Entry, _Mapping]] = ...) -> None: ...
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    STARTS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    DEPTHS_FIELD_NUMBER: _ClassVar[int]
    CHILDREN_FIELD_NUMBER: _ClassVar[int]
    TENANTS_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    sessions: _containers.RepeatedScalarFieldContainer[str]
    starts: _containers.RepeatedScalarFieldContainer[int]
    tokens: _containers.RepeatedScalarFieldContainer[int]
    counts: _containers.RepeatedScalarFieldContainer[int]
    nodes: _containers.RepeatedScalarFieldContainer[int]
    depths: _containers.RepeatedScalarFieldContainer[int]
    children: _containers.RepeatedScalarFieldContainer[int]
    tenants: _containers.RepeatedScalarFieldContainer[str]
    more: _containers.MessageMap[int, Entry]
    def __init__(self, sessions: _Optional[_Iterable[str]] = ..., starts: _Optional[_Iterable[int]] = ..., tokens: _Optional[_Iterable[int]] = ..., counts: _Optional[_Iterable[int]] = ..., nodes: _Optional[_Iterable[int]] = ..., depths: _Optional[_Iterable[int]] = ..., children: _Optional[_Iterable[int]] = ..., tenants: _Optional[_Iterable[str]] = ..., more: _Optional[_Mapping[int, Entry]] = ...) -> None: ...

class Entry(_message.Message):
    __slots__ = ("session", "start", "tokens", "rejected", "budget", "opening", "closing", "tenant", "withheld")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    REJECTED_FIELD_NUMBER: _ClassVar[int]
    BUDGET_FIELD_NUMBER: _ClassVar[int]
    OPENING_FIELD_NUMBER: _ClassVar[int]
    CLOSING_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    WITHHELD_FIELD_NUMBER: _ClassVar[int]
    session: str
    start: int
    tokens: _containers.RepeatedScalarFieldContainer[int]
    rejected: _containers.RepeatedCompositeFieldContainer[Rejected]
    budget: Budget
    opening: Opening
    closing: bool
    tenant: str
    withheld: bool
    def __init__(self, session: _Optional[str] = ..., start: _Optional[int] = ..., tokens: _Optional[_Iterable[int]] = ..., rejected: _Optional[_Iterable[_Union[Rejected, _Mapping]]] = ..., budget: _Optional[_Union[Budget, _Mapping]] = ..., opening: _Optional[_Union[Opening, _Mapping]] = ..., closing: bool = ..., tenant: _Optional[str] = ..., withheld: bool = ...) -> None: ...

class Queries(_message.Message):
    __slots__ = ("counts", "tokens", "lengths", "nodes", "depths", "children")
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    LENGTHS_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    DEPTHS_FIELD_NUMBER: _ClassVar[int]
    CHILDREN_FIELD_NUMBER: _ClassVar[int]
    counts: _containers.RepeatedScalarFieldContainer[int]
    tokens: _containers.RepeatedScalarFieldContainer[int]
    lengths: _containers.RepeatedScalarFieldContainer[int]
    nodes: _containers.RepeatedScalarFieldContainer[int]
    depths: _containers.RepeatedScalarFieldContainer[int]
    children: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, counts: _Optional[_Iterable[int]] = ..., tokens: _Optional[_Iterable[int]] = ..., lengths: _Optional[_Iterable[int]] = ..., nodes: _Optional[_Iterable[int]] = ..., depths: _Optional[_Iterable[int]] = ..., children: _Optional[_Iterable[int]] = ...) -> None: ...

class Opening(_message.Message):
    __slots__ = ("conversation", "forbid_publish", "prompt_length", "handing_over", "user", "priors", "workspace", "group", "epoch")
    CONVERSATION_FIELD_NUMBER: _ClassVar[int]
    FORBID_PUBLISH_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    HANDING_OVER_FIELD_NUMBER: _ClassVar[int]
    USER_FIELD_NUMBER: _ClassVar[int]
    PRIORS_FIELD_NUMBER: _ClassVar[int]
    WORKSPACE_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    conversation: str
    forbid_publish: bool
    prompt_length: int
    handing_over: bool
    user: str
    priors: _containers.RepeatedScalarFieldContainer[str]
    workspace: str
    group: str
    epoch: int
    def __init__(self, conversation: _Optional[str] = ..., forbid_publish: bool = ..., prompt_length: _Optional[int] = ..., handing_over: bool = ..., user: _Optional[str] = ..., priors: _Optional[_Iterable[str]] = ..., workspace: _Optional[str] = ..., group: _Optional[str] = ..., epoch: _Optional[int] = ...) -> None: ...

class Rejected(_message.Message):
    __slots__ = ("position", "tokens")
    POSITION_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    position: int
    tokens: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, position: _Optional[int] = ..., tokens: _Optional[_Iterable[int]] = ...) -> None: ...

class Budget(_message.Message):
    __slots__ = ("nodes", "depth", "children")
    NODES_FIELD_NUMBER: _ClassVar[int]
    DEPTH_FIELD_NUMBER: _ClassVar[int]
    CHILDREN_FIELD_NUMBER: _ClassVar[int]
    nodes: int
    depth: int
    children: int
    def __init__(self, nodes: _Optional[int] = ..., depth: _Optional[int] = ..., children: _Optional[int] = ...) -> None: ...

class DraftReply(_message.Message):
    __slots__ = ("step", "statuses", "known", "nodes", "tokens", "parents", "probs", "sources", "answers", "without_rejected", "tenants", "refusals", "columns", "packed_trees")
    class RefusalsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: str
        def __init__(self, key: _Optional[int] = ..., value: _Optional[str] = ...) -> None: ...
    STEP_FIELD_NUMBER: _ClassVar[int]
    STATUSES_FIELD_NUMBER: _ClassVar[int]
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    PARENTS_FIELD_NUMBER: _ClassVar[int]
    PROBS_FIELD_NUMBER: _ClassVar[int]
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    ANSWERS_FIELD_NUMBER: _ClassVar[int]
    WITHOUT_REJECTED_FIELD_NUMBER: _ClassVar[int]
    TENANTS_FIELD_NUMBER: _ClassVar[int]
    REFUSALS_FIELD_NUMBER: _ClassVar[int]
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    PACKED_TREES_FIELD_NUMBER: _ClassVar[int]
    step: int
    statuses: _containers.RepeatedScalarFieldContainer[Status]
    known: _containers.RepeatedScalarFieldContainer[int]
    nodes: _containers.RepeatedScalarFieldContainer[int]
    tokens: _containers.RepeatedScalarFieldContainer[int]
    parents: _containers.RepeatedScalarFieldContainer[int]
    probs: _containers.RepeatedScalarFieldContainer[float]
    sources: bytes
    answers: Answers
    without_rejected: bool
    tenants: bool
    refusals: _containers.ScalarMap[int, str]
    columns: bool
    packed_trees: bytes
    def __init__(self, step: _Optional[int] = ..., statuses: _Optional[_Iterable[_Union[Status, str]]] = ..., known: _Optional[_Iterable[int]] = ..., nodes: _Optional[_Iterable[int]] = ..., tokens: _Optional[_Iterable[int]] = ..., parents: _Optional[_Iterable[int]] = ..., probs: _Optional[_Iterable[float]] = ..., sources: _Optional[bytes] = ..., answers: _Optional[_Union[Answers, _Mapping]] = ..., without_rejected: bool = ..., tenants: bool = ..., refusals: _Optional[_Mapping[int, str]] = ..., columns: bool = ..., packed_trees: _Optional[bytes] = ...) -> None: ...

class Answers(_message.Message):
    __slots__ = ("counts", "nodes")
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    counts: _containers.RepeatedScalarFieldContainer[int]
    nodes: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, counts: _Optional[_Iterable[int]] = ..., nodes: _Optional[_Iterable[int]] = ...) -> None: ...
