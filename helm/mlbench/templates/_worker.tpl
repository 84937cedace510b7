{{/* The pod of every worker, into which the engine writes what belongs to a run. */}}
{{- define "mlbench.workerPod" -}}
metadata:
  labels:
    {{- with .Values.worker.podLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
    {{- include "mlbench.selector.worker" . | nindent 4 }}
    app: mlbench
    component: worker
  {{- if or .Values.limits.bandwidth .Values.worker.podAnnotations }}
  annotations:
    {{- with .Values.limits.bandwidth }}
    kubernetes.io/ingress-bandwidth: {{ printf "%dM" (int .) }}
    kubernetes.io/egress-bandwidth: {{ printf "%dM" (int .) }}
    {{- end }}
    {{- with .Values.worker.podAnnotations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- end }}
spec:
  serviceAccountName: {{ include "mlbench.worker" . }}
  automountServiceAccountToken: false
  enableServiceLinks: false
  securityContext:
    {{- include "mlbench.podSecurity" . | nindent 4 }}
  {{- with include "mlbench.pullSecrets" . }}
  imagePullSecrets:
    {{- . | nindent 4 }}
  {{- end }}
  {{- with .Values.worker.priorityClassName }}
  priorityClassName: {{ . | quote }}
  {{- end }}
  {{- with .Values.worker.nodeSelector }}
  nodeSelector:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .Values.worker.tolerations }}
  tolerations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .Values.worker.affinity }}
  affinity:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  containers:
    - name: worker
      imagePullPolicy: {{ .Values.worker.image.pullPolicy }}
      {{- with .Values.worker.env }}
      env:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      {{- with .Values.worker.memory }}
      resources:
        requests: {memory: {{ . | quote }}}
        limits: {memory: {{ . | quote }}}
      {{- end }}
      securityContext:
        {{- include "mlbench.containerSecurity" (dict "readOnly" false) | nindent 8 }}
      volumeMounts:
        - name: shm
          mountPath: /dev/shm
        {{- if include "mlbench.hasDatasets" . }}
        - name: datasets
          mountPath: {{ .Values.datasets.mountPath | quote }}
          readOnly: {{ .Values.datasets.readOnly }}
        {{- end }}
  volumes:
    - name: shm
      emptyDir:
        medium: Memory
        sizeLimit: {{ .Values.worker.sharedMemory | quote }}
    {{- if include "mlbench.hasDatasets" . }}
    - name: datasets
      persistentVolumeClaim:
        claimName: {{ include "mlbench.datasets" . | quote }}
        readOnly: {{ .Values.datasets.readOnly }}
    {{- end }}
{{- end -}}

{{/* Environment variables of the engine. */}}
{{- define "mlbench.engineEnv" -}}
- name: MLBENCH_KUBERNETES_NAMESPACE
  value: {{ .Release.Namespace | quote }}
- name: MLBENCH_KUBERNETES_MARK
  value: {{ include "mlbench.mark" . | quote }}
- name: MLBENCH_KUBERNETES_MASTER_URL
  value: http://{{ include "mlbench.master" . }}.{{ .Release.Namespace }}.svc:{{ .Values.master.service.port }}
- name: MLBENCH_KUBERNETES_POD_TEMPLATE
  value: /etc/mlbench/worker.yaml
- name: MLBENCH_IMAGE_REGISTRY
  value: {{ .Values.worker.image.registry | quote }}
{{- if and .Values.persistence.enabled (has "ReadWriteMany" .Values.persistence.accessModes) }}
# Workers on other nodes can mount only such a claim.
- name: MLBENCH_KUBERNETES_SHARED_CLAIM
  value: {{ include "mlbench.dataClaim" . | quote }}
- name: MLBENCH_KUBERNETES_SHARED_MOUNT
  value: /data
{{- end }}
{{- end -}}
