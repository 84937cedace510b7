{{/* What a JSON schema cannot say, or can only refuse without a reason. */}}
{{- define "mlbench.checks" -}}
{{- $v := .Values -}}
{{- if $v.worker.sshKey }}
{{- fail "worker.sshKey must be left out: workers have no SSH server and share no key; each rank is a pod of its own" }}
{{- end }}
{{- if or $v.worker.image.repository $v.worker.image.tag }}
{{- fail "worker.image.repository and worker.image.tag must be left out: each run names its image, and worker.image.registry is where those of the tasks are" }}
{{- end }}
{{- if hasKey $v "nvidiaDevicePlugin" }}
{{- fail "nvidiaDevicePlugin must be left out: install the NVIDIA GPU operator in the cluster, then use 'mlbench run --gpu'" }}
{{- end }}
{{- $sources := list }}
{{- if $v.datasets.existingClaim }}{{ $sources = append $sources "datasets.existingClaim" }}{{ end }}
{{- if $v.nfs.enabled }}{{ $sources = append $sources "nfs.enabled" }}{{ end }}
{{- if $v.gcePersistentDisk.enabled }}{{ $sources = append $sources "gcePersistentDisk.enabled" }}{{ end }}
{{- if gt (len $sources) 1 }}
{{- fail (printf "%s must not be set together: the data sets are on one volume, so choose one" (join ", " $sources)) }}
{{- end }}
{{- if and $v.nfs.enabled (not (and $v.nfs.server $v.nfs.path)) }}
{{- fail "nfs.server and nfs.path must be set with nfs.enabled: name the server and its exported folder" }}
{{- end }}
{{- if and $v.gcePersistentDisk.enabled (not $v.gcePersistentDisk.pdName) }}
{{- fail "gcePersistentDisk.pdName must be set with gcePersistentDisk.enabled: name the disk" }}
{{- end }}
{{- if and $v.gcePersistentDisk.enabled (not $v.datasets.readOnly) }}
{{- fail "datasets.readOnly must be true with gcePersistentDisk.enabled: several nodes can only read such a disk" }}
{{- end }}
{{- if and $v.ingress.enabled (not $v.ingress.host) }}
{{- fail "ingress.host must be set with ingress.enabled: name the host under which browsers reach the master" }}
{{- end }}
{{- $policy := $v.networkPolicy }}
{{- if and $v.ingress.enabled $policy.enabled (not (or $policy.master.namespaces $policy.master.cidrs)) }}
{{- fail "networkPolicy.master.namespaces must name the namespace of the ingress controller with ingress.enabled: its requests would be dropped" }}
{{- end }}
{{- if and $v.master.service.nodePort (eq $v.master.service.type "ClusterIP") }}
{{- fail "master.service.nodePort must be left out with master.service.type ClusterIP: choose NodePort or LoadBalancer" }}
{{- end }}
{{- end -}}
