{{/* Names. A suffix of up to 20 characters fits into the 63 of a DNS label. */}}
{{- define "mlbench.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else if contains .Chart.Name .Release.Name -}}
{{- .Release.Name | replace "." "-" | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name .Chart.Name | replace "." "-" | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "mlbench.master" -}}
{{- printf "%s-%s" (include "mlbench.fullname" .) .Values.master.name -}}
{{- end -}}

{{- define "mlbench.worker" -}}
{{- printf "%s-worker" (include "mlbench.fullname" .) -}}
{{- end -}}

{{/* The label by which the engine knows the jobs of this release. */}}
{{- define "mlbench.mark" -}}
{{- if or (gt (len .Release.Name) 30) (contains "." .Release.Name) -}}
{{- printf "%s-%s" (.Release.Name | replace "." "-" | trunc 20 | trimSuffix "-") (.Release.Name | sha256sum | trunc 8) -}}
{{- else -}}
{{- .Release.Name -}}
{{- end -}}
{{- end -}}

{{- define "mlbench.datasets" -}}
{{- default (printf "%s-datasets" (include "mlbench.fullname" .)) .Values.datasets.existingClaim -}}
{{- end -}}

{{- define "mlbench.tokenSecret" -}}
{{- default (printf "%s-token" (include "mlbench.master" .)) .Values.master.token.existingSecret -}}
{{- end -}}

{{- define "mlbench.dataClaim" -}}
{{- default (include "mlbench.master" .) .Values.persistence.existingClaim -}}
{{- end -}}

{{/* The labels by which policies, services and deployments select pods; they never change for a release. */}}
{{- define "mlbench.selector.release" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "mlbench.selector.master" -}}
{{ include "mlbench.selector.release" . }}
app.kubernetes.io/component: master
{{- end -}}

{{- define "mlbench.selector.worker" -}}
{{ include "mlbench.selector.release" . }}
app.kubernetes.io/component: worker
{{- end -}}

{{- define "mlbench.labels" -}}
{{ include "mlbench.selector.release" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end -}}

{{/* With the two labels by which clients find the master in a cluster, as in version 3.0. */}}
{{- define "mlbench.labels.master" -}}
{{ include "mlbench.labels" . }}
app.kubernetes.io/component: master
app: mlbench
component: master
{{- end -}}

{{/* Call with (dict "image" .Values.X.image "root" $). */}}
{{- define "mlbench.image" -}}
{{- printf "%s:%s" .image.repository (default .root.Chart.AppVersion .image.tag) -}}
{{- end -}}

{{- define "mlbench.pullSecrets" -}}
{{- range .Values.imagePullSecrets }}
- name: {{ . | quote }}
{{- end }}
{{- end -}}

{{/* Both as the Pod Security Standard "restricted" demands them. */}}
{{- define "mlbench.podSecurity" -}}
runAsNonRoot: true
# The user of the images.
runAsUser: 1000
runAsGroup: 1000
fsGroup: 1000
# Otherwise each start changes the mode of all files of a volume, and opens the master's secrets to the group.
fsGroupChangePolicy: OnRootMismatch
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{- define "mlbench.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: {{ .readOnly }}
capabilities:
  drop: ["ALL"]
{{- end -}}

{{- define "mlbench.hasDatasets" -}}
{{- if or .Values.datasets.existingClaim .Values.nfs.enabled .Values.gcePersistentDisk.enabled }}true{{ end -}}
{{- end -}}
