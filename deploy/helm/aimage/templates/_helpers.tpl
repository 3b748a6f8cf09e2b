{{/* Arguments: (list CONTEXT COMPONENT). */}}
{{- define "aimage.selector" -}}
app.kubernetes.io/name: aimage
app.kubernetes.io/instance: {{ (index . 0).Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end }}

{{- define "aimage.labels" -}}
{{ include "aimage.selector" . }}
app.kubernetes.io/version: {{ (index . 0).Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ (index . 0).Release.Service }}
helm.sh/chart: {{ (index . 0).Chart.Name }}-{{ (index . 0).Chart.Version }}
{{- end }}

{{/* What all pods share. */}}
{{- define "aimage.pod" -}}
serviceAccountName: {{ .Release.Name }}-aimage
automountServiceAccountToken: false
# Service links would set variables named AIMAGE_..., which are settings of aimage.
enableServiceLinks: false
{{- with .Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
securityContext:
  runAsNonRoot: true
  # The user of all pods: the daemon and the workers write to one store.
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  seccompProfile:
    type: RuntimeDefault
{{- end }}

{{/* The placement of pods that use the store of a node. */}}
{{- define "aimage.placement" -}}
nodeSelector:
  {{- toYaml .Values.nodeSelector | nindent 2 }}
{{- with .Values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* What all containers share. */}}
{{- define "aimage.container" -}}
image: {{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}{{ with .Values.image.digest }}@{{ . }}{{ end }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  privileged: false
  capabilities:
    drop:
      - ALL
{{- end }}

{{- define "aimage.env" -}}
- name: AIMAGE_STORE
  value: /var/lib/aimage
- name: HOME
  value: /tmp
- name: XDG_STATE_HOME
  value: /tmp
{{- end }}

{{- define "aimage.probes" -}}
startupProbe:
  httpGet:
    path: /healthz
    port: http
  periodSeconds: 2
  failureThreshold: 30
livenessProbe:
  httpGet:
    path: /healthz
    port: http
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
readinessProbe:
  httpGet:
    path: /readyz
    port: http
  periodSeconds: 5
  timeoutSeconds: 5
{{- end }}

{{/* Arguments: (list CONTEXT COMPONENT PORT). */}}
{{- define "aimage.ports" -}}
- name: http
  port: {{ index . 2 }}
  targetPort: http
- name: metrics
  port: {{ (index . 0).Values.metrics.port }}
  targetPort: metrics
{{- end }}
