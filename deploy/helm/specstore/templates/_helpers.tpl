{{- define "specstore.name" -}}
{{- if contains "specstore" .Release.Name }}{{ .Release.Name }}{{ else }}{{ .Release.Name }}-specstore{{ end -}}
{{- end }}

{{- define "specstore.selector" -}}
app.kubernetes.io/name: specstore
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "specstore.metadata" -}}
name: {{ include "specstore.name" . }}
namespace: {{ .Release.Namespace }}
labels:
  {{- include "specstore.selector" . | nindent 2 }}
  app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
  app.kubernetes.io/managed-by: {{ .Release.Service }}
  helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{- define "specstore.image" -}}
image: {{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
{{- end }}

{{/* Words of `specstore serve`. */}}
{{- define "specstore.words" -}}
- serve
- --listen=0.0.0.0:50061
- --allow-remote
- --metrics-host=0.0.0.0
- --metrics-port=9090
{{- if .Values.persistence.enabled }}
- --data=/data
{{- end }}
{{- if .Values.persistence.encryptionSecretName }}
- --encryption-keys=/encryption/keys
{{- end }}
{{- if .Values.prior.claimName }}
- --prior=/prior
{{- end }}
{{- range $tenant, $folder := .Values.prior.tenants }}
- {{ printf "--tenant-prior=%s=/prior/%s" $tenant $folder | quote }}
{{- end }}
{{- if .Values.tls.secretName }}
- --tls-certificate=/tls/tls.crt
- --tls-key=/tls/tls.key
{{- end }}
{{- if .Values.tls.clientCertificates }}
- --tls-client-ca=/tls/ca.crt
{{- end }}
{{- if .Values.identities.secretName }}
- --identities=/identities/identities.toml
{{- end }}
{{- if .Values.share.url }}
- --share={{ .Values.share.url }}
{{- end }}
{{- if .Values.share.caSecretName }}
- --share-tls-ca=/share/ca.crt
{{- end }}
{{- if .Values.share.clientSecretName }}
- --share-tls-certificate=/share-client/tls.crt
- --share-tls-key=/share-client/tls.key
{{- end }}
{{- /* Numbers of values are floating-point: without int64 a large one would be written with an exponent. */}}
{{- range $option, $value := .Values.options }}
- --{{ kebabcase $option }}={{ if kindIs "float64" $value }}{{ if eq $value (floor $value) }}{{ int64 $value }}{{ else }}{{ $value }}{{ end }}{{ else }}{{ $value }}{{ end }}
{{- end }}
{{- end }}

{{/* The kubelet's own gRPC probe knows no TLS. */}}
{{- define "specstore.probe" -}}
{{- if .Values.tls.secretName }}
exec: {command: [specstore, health]}
timeoutSeconds: 15
{{- else }}
grpc: {port: 50061}
timeoutSeconds: 5
{{- end }}
{{- end }}
