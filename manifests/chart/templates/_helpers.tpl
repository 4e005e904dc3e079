{{- define "stowage.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{- define "stowage.labels" -}}
app.kubernetes.io/part-of: stowage
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}

{{- /* Whether a webhook completes pods. In shadow mode no pod asks for VRAM. */ -}}
{{- define "stowage.webhook" -}}
{{- if and .Values.podDefaults.enabled .Values.podDefaults.webhook (ne .Values.kubeScheduler.mode "shadow") }}true{{ end -}}
{{- end }}

{{- /* The scheduler's configuration of the mode. */ -}}
{{- define "stowage.schedulerConfig" -}}
{{- if eq .Values.kubeScheduler.mode "allocate" -}}
{{ .Files.Get "files/kube-scheduler-config.yaml" }}
{{- else -}}
{{ .Files.Get (printf "files/%s-kube-scheduler-config.yaml" .Values.kubeScheduler.mode) }}
{{- end -}}
{{- end }}

{{- define "stowage.policy" -}}
{{- if .Values.policy -}}
{{ .Values.policy }}
{{- else if eq .Values.kubeScheduler.mode "shadow" -}}
{{ .Files.Get "files/shadow-policy.yaml" }}
{{- else -}}
{{ .Files.Get "files/policy.yaml" }}
{{- end -}}
{{- end }}
