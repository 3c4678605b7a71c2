{{- define "checkpoint-sidecar.name" -}}
{{- .Values.nameOverride | default .Chart.Name | trunc 63 | trimSuffix "-" -}}
{{- end -}}

{{- define "checkpoint-sidecar.fullname" -}}
{{- $name := include "checkpoint-sidecar.name" . -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 63 | trimSuffix "-" -}}
{{- else if contains $name .Release.Name -}}
{{- .Release.Name | trunc 63 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 63 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "checkpoint-sidecar.selector" -}}
app.kubernetes.io/name: {{ include "checkpoint-sidecar.name" . }}-webhook
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "checkpoint-sidecar.labels" -}}
{{ include "checkpoint-sidecar.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name (.Chart.Version | replace "+" "_") }}
{{- end -}}

{{- define "checkpoint-sidecar.image" -}}
{{- with .Values.image -}}
{{- if .digest -}}
{{- printf "%s@%s" .repository .digest -}}
{{- else -}}
{{- printf "%s:%s" .repository (.tag | default $.Chart.AppVersion) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "checkpoint-sidecar.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{- .Values.serviceAccount.name | default (include "checkpoint-sidecar.fullname" .) -}}
{{- else -}}
{{- .Values.serviceAccount.name | default "default" -}}
{{- end -}}
{{- end -}}

{{- define "checkpoint-sidecar.tlsSecret" -}}
{{- if eq .Values.certificate.from "existing" -}}
{{- required "certificate.secretName is needed with certificate.from=existing" .Values.certificate.secretName -}}
{{- else -}}
{{- include "checkpoint-sidecar.fullname" . }}-tls
{{- end -}}
{{- end -}}

{{- define "checkpoint-sidecar.host" -}}
{{- printf "%s.%s.svc" (include "checkpoint-sidecar.fullname" .) .Release.Namespace -}}
{{- end -}}
