{{/* Names of Services begin with it: they have at most 63 characters, begin with a letter, and hold no dot. */}}
{{- define "sg.name" -}}
{{- $name := .Release.Name }}
{{- if not (contains .Chart.Name $name) }}{{ $name = printf "%s-%s" $name .Chart.Name }}{{ end }}
{{- $longest := printf "%s-controller" $name }}
{{- if gt (len $longest) 63 }}{{ fail (printf "%s is too long: take a shorter name for the release" $longest) }}{{ end }}
{{- if not (regexMatch "^[a-z][-a-z0-9]*$" $name) }}{{ fail (printf "release %s: Services need a name that begins with a letter and has no dot" .Release.Name) }}{{ end }}
{{- $name }}
{{- end }}

{{/* What selects a component's pods, and all that they carry: a version there would start every replica again when the
chart changes. Takes (list root component). */}}
{{- define "sg.selector" -}}
app.kubernetes.io/name: {{ (index . 0).Chart.Name }}
app.kubernetes.io/instance: {{ (index . 0).Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end }}

{{- define "sg.labels" -}}
{{ include "sg.selector" . }}
app.kubernetes.io/version: {{ (index . 0).Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ (index . 0).Release.Service }}
helm.sh/chart: {{ printf "%s-%s" (index . 0).Chart.Name (index . 0).Chart.Version }}
{{- end }}

{{- define "sg.image" -}}
{{- $image := index . 1 -}}
{{ $image.repository }}{{ if $image.digest }}@{{ $image.digest }}{{ else }}:{{ $image.tag | default (index . 0).Chart.AppVersion }}{{ end }}
{{- end }}

{{/* Of every pod. Takes its user's number, which is its group's too. */}}
{{- define "sg.podSecurity" -}}
runAsNonRoot: true
runAsUser: {{ . }}
runAsGroup: {{ . }}
fsGroup: {{ . }}
fsGroupChangePolicy: OnRootMismatch
seccompProfile: { type: RuntimeDefault }
{{- end }}

{{- define "sg.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: { drop: [ALL] }
{{- end }}

{{- define "sg.spread" -}}
{{- range $topology := list "topology.kubernetes.io/zone" "kubernetes.io/hostname" }}
- maxSkew: 1
  topologyKey: {{ $topology }}
  whenUnsatisfiable: ScheduleAnyway
  labelSelector:
    matchLabels: {{- include "sg.selector" $ | nindent 6 }}
  matchLabelKeys: [pod-template-hash]
{{- end }}
{{- end }}

{{/* A variable from a Secret. Takes (list name secret key). */}}
{{- define "sg.fromSecret" -}}
- name: {{ index . 0 }}
  valueFrom: { secretKeyRef: { name: {{ index . 1 | quote }}, key: {{ index . 2 | quote }} } }
{{- end }}

{{- define "sg.plain" -}}
- { name: {{ index . 0 }}, value: {{ index . 1 | toString | quote }} }
{{- end }}

{{/* Numbers of a values file come as floats; a large one must not be told as 1.07e+09. */}}
{{- define "sg.number" -}}
{{ if and (kindIs "float64" .) (eq (floor .) .) }}{{ int64 . }}{{ else }}{{ . }}{{ end }}
{{- end }}

{{/* A role's further settings. */}}
{{- define "sg.settings" -}}
{{- range $name, $value := . }}
- { name: STREAM_GW_{{ $name }}, value: {{ include "sg.number" $value | quote }} }
{{- end }}
{{- end }}

{{/* Settings of a role that come from Secrets. */}}
{{- define "sg.secretSettings" -}}
{{- range $name, $from := . }}
{{ include "sg.fromSecret" (list (printf "STREAM_GW_%s" $name) $from.name $from.key) }}
{{- end }}
{{- end }}

{{- define "sg.redisEnv" -}}
{{- if .Values.redis.trial }}
{{ include "sg.plain" (list "STREAM_GW_REDIS_URL" (printf "redis://%s-redis:6379/0" (include "sg.name" .))) }}
{{- else }}
{{ include "sg.fromSecret" (list "STREAM_GW_REDIS_URL" (required "redis.secret.name: a Secret with the Redis' URL (or redis.trial)" .Values.redis.secret.name) .Values.redis.secret.key) }}
{{- end }}
{{ include "sg.plain" (list "STREAM_GW_PARTITIONS" (include "sg.number" .Values.partitions)) }}
{{- end }}

{{- define "sg.kafkaServers" -}}
{{- if .Values.kafka.trial }}{{ include "sg.name" . }}-kafka:9092
{{- else }}{{ required "kafka.servers: where Kafka is (or kafka.trial)" .Values.kafka.servers }}{{ end -}}
{{- end }}

{{- define "sg.eventsEnv" -}}
{{ include "sg.plain" (list "STREAM_GW_EVENTS" .Values.events.by) }}
{{- if eq .Values.events.by "kafka" }}
{{ include "sg.plain" (list "STREAM_GW_EVENTS_TOPIC" .Values.events.topic) }}
{{ include "sg.plain" (list "STREAM_GW_KAFKA_SERVERS" (include "sg.kafkaServers" .)) }}
{{ include "sg.plain" (list "STREAM_GW_TELEMETRY_CREATE_TOPICS" (or .Values.events.createTopics .Values.kafka.trial)) }}
{{- if .Values.kafka.tls }}
{{ include "sg.plain" (list "STREAM_GW_KAFKA_TLS" true) }}
{{- if .Values.kafka.caSecret.name }}
{{ include "sg.plain" (list "STREAM_GW_KAFKA_CA" (printf "/etc/stream-gw/kafka/%s" .Values.kafka.caSecret.key)) }}
{{- end }}
{{- with .Values.kafka.clientSecret }}
{{- if .name }}
{{ include "sg.plain" (list "STREAM_GW_KAFKA_CERT" (printf "/etc/stream-gw/kafka-client/%s" .certKey)) }}
{{ include "sg.plain" (list "STREAM_GW_KAFKA_KEY" (printf "/etc/stream-gw/kafka-client/%s" .keyKey)) }}
{{- end }}
{{- end }}
{{- end }}
{{- if .Values.kafka.sasl }}
{{ include "sg.plain" (list "STREAM_GW_KAFKA_SASL" .Values.kafka.sasl) }}
{{- $secret := required "kafka.secret.name: a Secret with Kafka's user and password" .Values.kafka.secret.name }}
{{ include "sg.fromSecret" (list "STREAM_GW_KAFKA_USER" $secret .Values.kafka.secret.userKey) }}
{{ include "sg.fromSecret" (list "STREAM_GW_KAFKA_PASSWORD" $secret .Values.kafka.secret.passwordKey) }}
{{- end }}
{{- end }}
{{- end }}

{{/* Of who emits events. */}}
{{- define "sg.emitEnv" -}}
{{ include "sg.eventsEnv" . }}
{{- if ne .Values.events.by "off" }}
{{ include "sg.plain" (list "STREAM_GW_EVENTS_SPOOL" "/var/spool/stream-gw") }}
{{ include "sg.plain" (list "STREAM_GW_EVENTS_SPOOL_BYTES_MAX" (include "sg.number" .Values.events.spool.bytesMax)) }}
{{- end }}
{{- end }}

{{- define "sg.certificateMounts" -}}
{{- if .Values.certificates.secret }}
- { name: certificates, mountPath: /etc/stream-gw/certificates, readOnly: true }
{{- end }}
{{- if and (eq .Values.events.by "kafka") .Values.kafka.tls .Values.kafka.caSecret.name }}
- { name: kafka-ca, mountPath: /etc/stream-gw/kafka, readOnly: true }
{{- end }}
{{- if and (eq .Values.events.by "kafka") .Values.kafka.tls .Values.kafka.clientSecret.name }}
- { name: kafka-client, mountPath: /etc/stream-gw/kafka-client, readOnly: true }
{{- end }}
{{- end }}

{{- define "sg.certificateVolumes" -}}
{{- if .Values.certificates.secret }}
- name: certificates
  secret: { secretName: {{ .Values.certificates.secret | quote }} }
{{- end }}
{{- if and (eq .Values.events.by "kafka") .Values.kafka.tls .Values.kafka.caSecret.name }}
- name: kafka-ca
  secret: { secretName: {{ .Values.kafka.caSecret.name }} }
{{- end }}
{{- if and (eq .Values.events.by "kafka") .Values.kafka.tls .Values.kafka.clientSecret.name }}
- name: kafka-client
  secret: { secretName: {{ .Values.kafka.clientSecret.name | quote }} }
{{- end }}
{{- end }}

{{- define "sg.emitMounts" -}}
- { name: tmp, mountPath: /tmp }
{{- if ne .Values.events.by "off" }}
- { name: spool, mountPath: /var/spool/stream-gw }
{{- end }}
{{- include "sg.certificateMounts" . }}
{{- end }}

{{- define "sg.emitVolumes" -}}
- { name: tmp, emptyDir: {} }
{{- if ne .Values.events.by "off" }}
- name: spool
  {{- toYaml (.Values.events.spool.volume | default (dict "emptyDir" dict)) | nindent 2 }}
{{- end }}
{{- include "sg.certificateVolumes" . }}
{{- end }}

{{/* Moderation, of gateways and agents. */}}
{{- define "sg.moderationEnv" -}}
{{- $moderation := .Values.moderation }}
{{- if $moderation.url }}
{{ include "sg.plain" (list "STREAM_GW_MODERATION_URL" $moderation.url) }}
{{ include "sg.plain" (list "STREAM_GW_MODERATION_TIMEOUT_S" (include "sg.number" $moderation.timeoutSeconds)) }}
{{- if $moderation.model }}
{{ include "sg.plain" (list "STREAM_GW_MODERATION_MODEL" $moderation.model) }}
{{- end }}
{{- if $moderation.secret.name }}
{{ include "sg.fromSecret" (list "STREAM_GW_MODERATION_KEY" $moderation.secret.name $moderation.secret.key) }}
{{- end }}
{{- end }}
{{- if $moderation.rules.name }}
{{ include "sg.plain" (list "STREAM_GW_MODERATION_RULES_FILE" (printf "/etc/stream-gw/moderation/%s" $moderation.rules.key)) }}
{{- end }}
{{- if or $moderation.url $moderation.rules.name }}
{{ include "sg.plain" (list "STREAM_GW_MODERATION_FAIL" $moderation.fail) }}
{{- end }}
{{- end }}

{{- define "sg.moderationMount" -}}
{{- if .Values.moderation.rules.name }}
- { name: moderation, mountPath: /etc/stream-gw/moderation, readOnly: true }
{{- end }}
{{- end }}

{{- define "sg.moderationVolume" -}}
{{- if .Values.moderation.rules.name }}
- name: moderation
  configMap: { name: {{ .Values.moderation.rules.name | quote }} }
{{- end }}
{{- end }}

{{- define "sg.telemetry" -}}
{{- if and .Values.telemetry.enabled (ne .Values.events.by "off") }}true{{ end -}}
{{- end }}

{{/* A pool's values over the defaults: lists and plain values whole, maps key by key. */}}
{{- define "sg.pool" -}}
{{- $merged := mergeOverwrite (deepCopy (index . 0).Values.poolDefaults) (deepCopy (index . 1)) -}}
{{- range $whole := list "nodeSelector" "modelCache" }}
{{- if hasKey (index $ 1) $whole }}{{ $_ := set $merged $whole (index (index $ 1) $whole) }}{{ end }}
{{- end }}
{{- toYaml $merged -}}
{{- end }}

{{- define "sg.poolName" -}}
{{- $name := printf "%s-pool-%s" (include "sg.name" (index . 0)) ((index . 1).name | replace "." "-") -}}
{{- if gt (len $name) 63 }}{{ fail (printf "%s is too long: take shorter names for the release or the pool" $name) }}{{ end -}}
{{ $name }}
{{- end }}
