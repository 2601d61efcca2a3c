"""The systems that kafkalog is measured beside: how each is had, started, loaded and stopped, on this machine alone.

| module | what it starts | from |
|---|---|---|
| `kafka` | Apache Kafka's brokers, and its own ProducerPerformance and ConsumerPerformance | jars |
| `rabbitmq` | a RabbitMQ node | the Debian package `rabbitmq-server` |
| `activemq` | an ActiveMQ broker over KahaDB | jars |

`librdkafka` and `connector` are those clients of Kafka that need more than their names: how they are tuned, and the
topics that they use. `java` runs the programs of the folder of that name, which load the two queues; `queues` is what
both are. `jars` gets jars by their Maven coordinates, and `processes` has what all that are started share. A peer that
cannot be had on a machine raises `NotAvailable` with the reason; the benchmark then names it as missing.
"""
